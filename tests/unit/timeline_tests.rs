use super::*;

fn lane() -> Arc<Lane> {
    let lane = Lane::new(None, &Arc::default());
    lane.queue.get_or_init(|| ArrayQueue::new(RECORDS));
    lane
}

#[test]
fn without_a_session_nothing_is_noted() {
    let lane = lane();
    drop(lane.slice(Category::Op, "fill", None));
    assert!(lane.queue.get().unwrap().is_empty() && lane.start().is_none());
    lane.sessions.fetch_advance();
    drop(lane.slice(Category::Op, "fill", None).note(|slice| slice.bytes = 8));
    let Some(Record::Slice(slice)) = lane.queue.get().unwrap().pop() else { panic!("a slice") };
    assert_eq!((slice.name, slice.bytes, slice.end >= slice.start), ("fill", 8, true));
}

#[test]
fn a_full_lane_drops_and_counts() {
    let lane = lane();
    lane.sessions.fetch_advance();
    (0..RECORDS + 10).for_each(|_| drop(lane.slice(Category::Op, "fill", None)));
    assert_eq!((lane.queue.get().unwrap().len(), lane.dropped.get()), (RECORDS, 10));
}
