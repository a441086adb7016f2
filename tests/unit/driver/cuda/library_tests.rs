use super::*;

#[test]
fn words_for_each_way_to_have_no_device() {
    let e = open_failed("cuInit", 100).to_string();
    assert!(e.starts_with("no device: the CUDA driver is there but sees no GPU"), "{e}");
    assert!(e.ends_with("cuInit returned CUDA_ERROR_NO_DEVICE (100)"), "{e}");
    assert!(open_failed("cuInit", 34).to_string().contains("stub"));
    assert!(open_failed("cuInit", 803).to_string().contains("different driver versions"));
}

#[test]
fn old_drivers_are_refused() {
    assert_eq!(too_old(12020), None);
    assert_eq!(too_old(13000), None);
    assert_eq!(too_old(11080).unwrap(), "driver >= 535 needed (CUDA 12.2); the driver here supports CUDA 11.8 only");
}

#[test]
fn a_missing_library_is_an_error_and_no_panic() {
    match ready() {
        Ok(_) => println!("skipped: there is a CUDA driver here"),
        Err(e) => assert!(matches!(e, Error::NoDevice { .. }), "{e}"),
    }
}
