use super::*;

/// One launch packs 16 buffers, and one unpacks them.
#[test]
fn fewer_launches() {
    let paying: Vec<usize> = (0..20).filter(|count| pays(*count)).collect();
    assert_eq!(paying, (4..20).collect::<Vec<_>>());
    assert!((20..1000).all(pays));
}
