use super::*;

/// The first process may close its pool when another one has not read of the end of their last scope.
#[test]
fn who_leaves_after_the_end_of_a_scope_does_not_fail_it() {
    for ended in [true, false] {
        let mut process = Process::new(1);
        let (scope, _) = process.begin(Entry::Unnamed { nth: 1, failed: None }, Duration::MAX, String::new());
        process.end(scope).unwrap();
        if ended {
            process.take(ToHost::Ended { scope }).unwrap();
        }
        let left = Failure::lost(0, "it has left the cluster");
        process.take(ToHost::Over { failure: left.clone() }).unwrap();
        let failure = (!ended).then_some(left);
        assert_eq!(process.failure_elsewhere(scope), failure);
        assert_eq!(process.ended(scope), Some(failure.map_or(Ok(()), Err)));
    }
}
