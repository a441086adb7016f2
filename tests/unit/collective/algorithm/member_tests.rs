use super::*;

#[test]
fn room_is_left_beside_a_kernel_that_waits() {
    assert!(comes_early(true, 1, 132, 1) && comes_early(true, 64, 132, 1));
    assert!(!comes_early(true, 68, 132, 1) && comes_early(false, 128, 132, 1));
    // A peer's kernel must find room on the same GPU.
    assert!(!comes_early(true, 1, 132, 2) && !comes_early(false, 1, 132, 2));
    // Parts of a GPU, and software GPUs.
    assert!(!comes_early(true, 1, 16, 1) && !comes_early(true, 1, 1, 1));
}
