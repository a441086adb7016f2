use super::*;

#[test]
fn a_class_holds_its_requests_and_wastes_little() {
    assert_eq!((class(0), class(1), class(256), class(257)), (0, 0, 0, 1));
    assert_eq!((class(SMALL), bytes(CLASSES - 1)), (CLASSES - 1, SMALL));
    // As docs/src/guide/memory_pool.md says.
    assert_eq!((bytes(class(257)), CLASSES), (512, 56));
    let mut last = 0;
    for request in 1..=SMALL {
        let class = class(request);
        assert!(class == last || class == last + 1, "{request}");
        let bytes = bytes(class);
        assert!(bytes >= request && bytes.is_multiple_of(ALIGN), "{request} in {bytes}");
        let lost = if request <= LINEAR { ALIGN - 1 } else { request / 8 };
        assert!(bytes <= request + lost, "{request} in {bytes}");
        last = class;
    }
}

#[test]
fn a_slab_holds_enough_blocks() {
    for class in 0..CLASSES {
        assert!(slab_bytes(class) / bytes(class) >= 16, "{class}");
    }
}
