use super::*;

#[test]
fn kinds_by_what_the_caller_can_do() {
    use FaultKind::*;
    for (code, kind) in [
        (2, OutOfMemory),
        (700, DeviceLost),
        (719, DeviceLost),
        (214, DeviceLost),
        (46, DeviceLost),
        (217, PeerDenied),
        (705, PeerDenied),
        (500, NotFound),
        (209, NotFound),
        (1, InvalidArgument),
        (218, InvalidArgument),
        (400, InvalidArgument),
        (801, Unsupported),
        (999, Other),
        (708, Other),
        (123_456, Other),
    ] {
        assert_eq!(fault(code, "").kind, kind, "{code} {}", name(code));
    }
}

#[test]
fn every_name_is_the_drivers_own() {
    let mut codes = CODES.to_vec();
    codes.sort_unstable();
    assert!(codes.windows(2).all(|w| w[0] < w[1]));
    assert!(CODES.iter().all(|&c| name(c).starts_with("CUDA_ERROR_")));
    for r in [
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
        CUresult::CUDA_ERROR_UNKNOWN,
    ] {
        assert_eq!(format!("{r:?}"), name(code(r)));
    }
}

#[test]
fn display_needs_no_library() {
    assert_eq!(fault(2, "").to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
    assert_eq!(fault(218, "line 3").to_string(), "CUDA_ERROR_INVALID_PTX (218): line 3");
    assert_eq!(fault(4242, "").to_string(), "an unknown CUDA error (4242)");
}

#[test]
fn logs_end_at_their_nul() {
    assert_eq!(text(b"ptxas error\n\0\0rubbish"), "ptxas error");
    assert_eq!(text(b""), "");
}
