use super::*;
use crate::driver::ValueBytes;

#[test]
fn arguments_are_found_by_address() {
    let slice = KernelArg::Slice { address: 0x1234_5678_9abc, bytes: 8, write: false };
    // SAFETY: the address of a live argument.
    assert_eq!(unsafe { pointer(&slice).cast::<u64>().read() }, 0x1234_5678_9abc);
    let value = KernelArg::Value(ValueBytes::new(&2.5_f32.to_ne_bytes()));
    // SAFETY: as above.
    assert_eq!(unsafe { pointer(&value).cast::<f32>().read() }, 2.5);
}

#[test]
fn a_panic_stays_within_the_trampoline() {
    let run = |f: Box<dyn FnOnce() + Send>| {
        // SAFETY: a box of a box, as `launch_host` gives it.
        unsafe { trampoline(Box::into_raw(Box::new(f)).cast()) }
    };
    let (tell, told) = std::sync::mpsc::channel();
    run(Box::new(move || tell.send(7).unwrap()));
    assert_eq!(told.recv(), Ok(7));
    run(Box::new(|| panic!("within a stream")));
}
