use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn packed_values_come_back(values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6)) {
        prop_assert_eq!(decode::<Vec<Vec<u8>>>(&pack(values.clone().into_iter())).unwrap(), values);
    }

    /// Another process may send anything.
    #[test]
    fn any_bytes_can_be_looked_at(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        if let Ok(values) = decode::<Vec<Vec<u8>>>(&bytes) {
            prop_assert_eq!(decode::<Vec<Vec<u8>>>(&pack(values.clone().into_iter())).unwrap(), values);
        }
    }
}
