use super::*;

#[test]
fn any_number_of_elements_has_a_grid() {
    for (n, blocks) in [(0, 1), (256, 1), (257, 2), (1 << 39, i32::MAX as u32), (usize::MAX, i32::MAX as u32)] {
        assert_eq!(LaunchDims::stride(n).grid, (blocks, 1, 1), "{n}");
    }
}
