use gpu_pool::extend::sync::*;
use std::thread;

#[test]
fn exactly_one_side_wins() {
    const ROUNDS: usize = crate::rounds(2000);
    let (mut started, mut withdrawn) = (0, 0);
    for _ in 0..ROUNDS {
        let entry = Turnstile::new();
        assert!(entry.is_queued());
        let (start, withdraw) = thread::scope(|s| {
            let device = s.spawn(|| entry.start());
            (entry.withdraw(), device.join().unwrap())
        });
        assert!(start ^ withdraw);
        assert!(!entry.is_queued() && !entry.start() && !entry.withdraw());
        started += usize::from(start);
        withdrawn += usize::from(withdraw);
    }
    assert_eq!(started + withdrawn, ROUNDS);
}
