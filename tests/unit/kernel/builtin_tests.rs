use super::*;

#[test]
fn a_double_is_rounded_once() {
    assert_eq!(f16::from_f32(odd(1.0 + 2f64.powi(-11) + 2f64.powi(-40))), f16::from_f32(1.0 + 2f32.powi(-10)));
    assert_eq!(odd(1.5), 1.5);
    assert_eq!(odd(1e300), f32::INFINITY);
    assert_eq!(f16::from_f32(odd(-(1.0 + 2f64.powi(-11) - 2f64.powi(-40)))), f16::from_f32(-1.0));
}
