//! What values are taken apart into, and what is read of bytes that a peer has made up.

use super::*;
use crate::Error;
use std::panic::Location;

fn read<A: Transfer>(header: &[u8]) -> Result<A> {
    let no_memory = |bytes| Err(Error::custom(format!("{bytes} bytes are asked for")));
    A::unpack(&mut Unpack::new(("exchange", Location::caller()), header, &[], &no_memory))
}

fn written(value: impl Transfer) -> Vec<u8> {
    let mut pack = Pack::new(("exchange", Location::caller()));
    value.pack(&mut pack).unwrap();
    pack.into_parts().0
}

/// A list of values without bytes has a byte for each: else a peer could write a length that takes for ever to read.
#[test]
fn the_length_of_a_list_is_bounded_by_its_bytes() {
    for len in [0, 1, 1000] {
        assert_eq!(read::<Vec<()>>(&written(vec![(); len])).unwrap().len(), len);
        assert_eq!(read::<Vec<Vec<()>>>(&written(vec![vec![()]; len])).unwrap().len(), len);
    }
    for len in [1, 1001, u64::MAX] {
        let mut header = len.to_le_bytes().to_vec();
        header.extend_from_slice(&[0; 1000][..(len - 1).min(1000) as usize]);
        assert!(read::<Vec<()>>(&header).is_err(), "{len}");
        assert!(read::<Vec<u32>>(&header).is_err(), "{len}");
    }
}
