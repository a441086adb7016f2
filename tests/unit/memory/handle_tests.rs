use super::*;

fn size_of_result<T>(_: impl Fn(&DeviceHandle) -> T) -> usize {
    size_of::<T>()
}

/// It goes with every message between devices, so it must cost next to nothing without a checker.
#[test]
fn what_a_thread_knows_is_small() {
    assert_eq!(size_of_result(DeviceHandle::release), size_of::<usize>());
    assert_eq!(size_of_result(DeviceHandle::hand_over), size_of::<usize>());
}
