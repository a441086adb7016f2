use super::*;
use crate::GpuPool;

/// Each priority has a stream, which is not one of another priority.
#[test]
fn buckets_have_streams_of_their_priority() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        let plain = dev.stream()?.core.id;
        let exchange = GradientExchange::builder().first_bucket_bytes(1).bucket_bytes(1).bucket_priorities(&[0, -1]);
        let exchange = exchange.build(dev, &[1; 4])?;
        let id = |bucket| exchange.stream(bucket).core.id;
        assert_eq!(exchange.streams.len(), 2);
        assert_eq!(id(0), plain, "an idle stream of the same priority is used again");
        assert!(id(1) != id(0) && id(1) == id(2) && id(2) == id(3));
        let priorities: Vec<i32> = (0..4).map(|bucket| exchange.settings.priority(bucket)).collect();
        assert_eq!(priorities, [0, -1, -1, -1]);
        let urgent = id(1);
        drop(exchange);
        assert_eq!(dev.stream_with_priority(-1)?.core.id, urgent);
        assert_ne!(dev.stream_with_priority(-2)?.core.id, urgent);
        Ok(())
    })
    .unwrap();
}
