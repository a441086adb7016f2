use super::*;
const DONTWAIT: RecvFlags = RecvFlags::DONTWAIT;
use std::os::fd::AsFd;

#[test]
fn descriptors_arrive_with_their_frame() {
    let (a, b) = UnixStream::pair().unwrap();
    let (inner, other) = UnixStream::pair().unwrap();
    send(&a, b"hello", Some(inner.as_fd())).unwrap();
    let mut frame = [0; 9];
    let (got, descriptors) = receive(&b, &mut frame, DONTWAIT).unwrap();
    assert_eq!((&frame[..got], descriptors.len()), (&b"hello"[..], 1));
    drop(inner);
    let inner = UnixStream::from(descriptors.into_iter().next().unwrap());
    send(&inner, b"x", None).unwrap();
    let (got, descriptors) = receive(&other, &mut frame, DONTWAIT).unwrap();
    assert_eq!((got, frame[0], descriptors.len()), (1, b'x', 0));
    assert_eq!(receive(&other, &mut frame, DONTWAIT).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(inner);
    assert_eq!(receive(&other, &mut frame, DONTWAIT).unwrap().0, 0);
}

#[test]
fn the_peer_is_this_process() {
    let (a, _b) = UnixStream::pair().unwrap();
    assert_eq!(peer(&a).unwrap(), (std::process::id(), own_user()));
}

#[test]
fn names_that_nobody_has_and_that_do_not_fit() {
    assert_eq!(connect("gpu-pool-ipc.nobody").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(connect(&"x".repeat(200)).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn a_poll_says_which() {
    let ((a, b), (c, _d)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    send(&a, b"x", None).unwrap();
    assert_eq!(poll(&[b.as_fd(), c.as_fd()], None), [true, false]);
    assert_eq!(poll(&[c.as_fd()], Some(Duration::from_millis(1))), [false]);
}
