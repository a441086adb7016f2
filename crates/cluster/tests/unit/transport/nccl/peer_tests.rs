//! What the bench's peer tells NCCL, of 8 elements on two devices.

use super::{
    super::peer::{Id, Op, Peer},
    *,
};
use gpu_pool::{DeviceBuffer, GpuPool};

#[test]
fn each_operation_names_its_memory() {
    let mut bytes = [0; UniqueId::BYTES];
    bytes[0] = 60;
    let id = Id { library: &LIBRARY, id: UniqueId(bytes) };
    let pool = GpuPool::builder().host(2).build().unwrap();
    let peers = pool.per_device(|dev, _| Peer::join(dev, id)).unwrap();
    pool.run(|dev, _| {
        let peer = &*peers.borrow(dev)?;
        // SAFETY: a handle of this library.
        let fake = unsafe { fake(peer.comm) };
        let submit = |op, src: Option<&DeviceBuffer<f32>>, dst: &mut DeviceBuffer<f32>| {
            let done = peer.submit(dev, op, src, dst, 1);
            let plan = &mut *fake.plan.lock();
            done.map(|()| (std::mem::take(&mut plan.calls), std::mem::take(&mut plan.memory)))
        };
        let (all, part) = (dev.zeros::<f32>(8)?, dev.zeros::<f32>(4)?);
        let (mut into, mut into_part) = (dev.zeros::<f32>(8)?, dev.zeros::<f32>(4)?);
        let [a, p, i, i_part] = [&all, &part, &into, &into_part].map(|buffer| buffer.address() as usize);
        let own = i + 16 * dev.rank();
        let sum = ReduceOp::Sum;
        for (op, src, call) in [
            (Op::AllReduce(sum), Some(&all), ("all_reduce", (a, i, 8))),
            (Op::AllReduce(sum), None, ("all_reduce", (i, i, 8))),
            (Op::AllGather, Some(&part), ("all_gather", (p, i, 4))),
            (Op::AllGather, None, ("all_gather", (own, i, 4))),
            (Op::ReduceScatter(sum), None, ("reduce_scatter", (i, own, 4))),
            (Op::Broadcast(1), None, ("broadcast", (i, i, 8))),
            (Op::Reduce(sum, 1), None, ("reduce", (i, i, 8))),
        ] {
            assert_eq!(submit(op, src, &mut into)?, (vec![call.0], vec![call.1]));
        }
        let scattered = submit(Op::ReduceScatter(sum), Some(&all), &mut into_part)?;
        assert_eq!(scattered, (vec!["reduce_scatter"], vec![(a, i_part, 4)]));
        assert_eq!(submit(Op::AllToAll, Some(&all), &mut into)?.0, ["send", "recv", "send", "recv"]);
        assert_eq!(submit(Op::SendRecv, Some(&all), &mut into)?.0, ["send", "recv"]);
        // Nothing is submitted where the lengths do not fit, or NCCL has no such reduction.
        submit(Op::AllReduce(sum), Some(&part), &mut into).unwrap_err();
        submit(Op::AllReduce(ReduceOp::Scaled(2.0)), Some(&all), &mut into).unwrap_err();
        assert!(fake.plan.lock().calls.is_empty());
        fake.plan.lock().fails = 1;
        assert!(submit(Op::AllGather, None, &mut into).unwrap_err().to_string().contains("a fake error"));
        Ok(())
    })
    .unwrap();
    drop(peers);
    pool.close().unwrap();
    assert!(made(60).iter().all(|fake| fake.plan.lock().calls.ends_with(&["destroy"])));
}
