use super::*;

#[test]
fn are_counted_by_state() {
    let block = |class, state| BlockInfo { class, state, ..BlockInfo::default() };
    let (live, free, pending) = (BlockState::Live, BlockState::Free, BlockState::Pending);
    let blocks = [(Some(4096), live), (Some(256), free), (Some(256), live), (Some(256), pending), (None, live)];
    let classes = MemoryClasses::of(&blocks.map(|(class, state)| block(class, state)));
    let expected = "     block     live     free  pending
     256 B        1        1        1
   4.0 KiB        1        0        0";
    assert_eq!(classes.to_string(), expected);
}
