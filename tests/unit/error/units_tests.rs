use super::*;

#[test]
fn bytes() {
    let shown = |bytes: u64| Bytes(bytes).to_string();
    assert_eq!(["0 B", "1023 B"], [shown(0), shown(1023)]);
    assert_eq!(["1.0 KiB", "1.5 KiB"], [shown(1024), shown(1536)]);
    assert_eq!(["1.0 MiB", "24.0 MiB", "1023.0 MiB"], [shown((1 << 20) - 1), shown(24 << 20), shown(1023 << 20)]);
    assert_eq!(["1.25 GiB", "16.00 EiB"], [shown(5 << 28), shown(u64::MAX)]);
    assert_eq!(format!("[{:>9}]", Bytes(24 << 20)), "[ 24.0 MiB]");
}

#[test]
fn times() {
    let shown = |us: u64| Micros(us).to_string();
    assert_eq!(["0 us", "999 us", "1.00 ms"], [shown(0), shown(999), shown(1000)]);
    assert_eq!(["12.34 ms", "3.200 s"], [shown(12_340), shown(3_200_000)]);
}
