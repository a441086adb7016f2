use super::*;
use proptest::prelude::*;

proptest! {
    /// Another process may send anything.
    #[test]
    fn any_bytes_can_be_read_as_a_head(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        if let Some(found) = read_head(&bytes) {
            prop_assert_eq!(read_head(&postcard::to_stdvec(&found).unwrap()), Some(found));
        }
    }
}
