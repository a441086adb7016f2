use super::{super::site::site, *};

#[test]
fn in_words() {
    let leak = |device, site, blocks, bytes| Leak { device, site, blocks, bytes };
    let leaks = vec![leak(0, Some(site("upload", 12)), 3, 24 << 20), leak(1, Some(site("zeros", 7)), 1, 512)];
    let expected = "\
24.0 MiB in 4 buffers still live
  device 0:   24.0 MiB in 3 buffers    upload at src/train.rs:12:9
  device 1:      512 B in 1 buffer     zeros at src/train.rs:7:9";
    assert_eq!(LeakReport { leaks }.to_string(), expected);

    let unknown = LeakReport { leaks: vec![leak(0, None, 1, 256)] }.to_string();
    assert!(unknown.contains("call site not recorded") && unknown.contains(HOW_TO_RECORD), "{unknown}");
    assert_eq!(LeakReport::default().to_string(), "no buffer is live");
}
