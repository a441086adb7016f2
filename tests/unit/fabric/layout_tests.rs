use super::*;

/// `docs/src/measured/collectives.md` has these numbers: change both.
#[test]
fn a_signal_pad_has_the_size_that_the_book_tells() {
    let mib = |devices| format!("{:.1}", PadLayout::direct(devices).bytes(devices) as f64 / (1 << 20) as f64);
    assert_eq!([2, 4, 8].map(mib), ["23.1", "27.3", "26.6"]);
}
