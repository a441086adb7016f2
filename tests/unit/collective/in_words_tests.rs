use super::*;

#[test]
fn limits_in_words() {
    assert_eq!(
        sizes(4),
        "pushed up to 128 KB, sent eagerly up to 341 KB, by parts up to 1 MB, sums exchanged by kernels \
         from 8 MB on, moved by copies from 128 MB on, a ring of kernels from 32 MB on, a block for 16 KB, \
         at most 64, 16 for sums in parts of 2 MB; sums of floats as data that are flags up to 375 KB"
    );
    assert_eq!(
        sizes(2),
        "pushed up to 256 KB, sent eagerly up to 1 MB, sums exchanged by copies from 64 MB on, \
         beside other work from 8 MB on, moved by copies from 128 MB on, a block for 16 KB, at most 64; \
         sums of floats as data that are flags up to 2 MB, in pieces in graphs from 128 MB on"
    );
    assert_eq!(Bytes(5).to_string(), "5 B");
}
