use super::*;

/// Also if the sequence wraps around, or if there were two writers: readers must not wait for ever.
#[test]
fn the_number_of_a_finished_write_is_even() {
    for start in [u64::MAX - 1, u64::MAX, 1, 2] {
        let mirror = Mirror { sequence: AtomicU64::new(start), cells: [AtomicU64::new(0)] };
        mirror.write([5]);
        assert_eq!(mirror.try_read(), Some([5]), "from {start}");
    }
}
