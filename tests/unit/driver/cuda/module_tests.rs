use super::*;

#[test]
fn the_newest_cubin_of_the_same_major() {
    let cubins: &[(u32, &'static [u8])] = &[(80, b"80"), (90, b"90"), (86, b"86"), (100, b"100")];
    assert_eq!(best_cubin(cubins, (9, 0)), Some(&b"90"[..]));
    assert_eq!(best_cubin(cubins, (8, 9)), Some(&b"86"[..]));
    assert_eq!(best_cubin(cubins, (8, 0)), Some(&b"80"[..]));
    assert_eq!(best_cubin(cubins, (10, 3)), Some(&b"100"[..]));
    assert_eq!(best_cubin(cubins, (7, 5)), None);
    assert_eq!(best_cubin(&[], (9, 0)), None);
}
