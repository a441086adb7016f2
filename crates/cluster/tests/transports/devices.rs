//! A process under `mpirun` whose pool gives MPI the addresses of its devices' memory.

use gpu_pool::{AsView, AsViewMut, Device, Error, GpuPool, ReduceOp, Result};
use gpu_pool_cluster::{
    Cluster, TransportChoice,
    extend::{FORCED, Transport, link_of},
    prelude::*,
};

/// Numbers whose sums are exact in any order.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 64) as f32 - 20.0).collect()
}

/// Processes have different numbers of devices, so some members have no rail.
pub fn of_a_process() {
    let cluster = match Cluster::launched().unwrap() {
        Some(cluster) => cluster.transport(TransportChoice::Mpi),
        None => return println!("skipped: no launcher"),
    };
    FORCED.set(true);
    let pool = match GpuPool::builder().host(1 + cluster.rank() % 2).cluster(cluster).build() {
        Ok(pool) => pool,
        Err(error @ Error::Cluster { .. }) if error.to_string().contains("no MPI library was found") => {
            return println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    };
    let moved = pool.run(|dev, _| {
        assert!(matches!(link_of(dev).world.transport(), Transport::Device(_)));
        [0, 1, 1000, 70_001].into_iter().try_for_each(|len| collectives(dev, len))
    });
    moved.unwrap();
    // A process whose closure fails: the others hear of it, and MPI goes on.
    let failed = pool.run(|dev, _| match dev.world()?.rank() {
        0 => Err(Error::custom("on purpose")),
        _ => dev.world()?.barrier(),
    });
    assert!(failed.is_err());
    pool.run(|dev, _| collectives(dev, 100)).unwrap();
    pool.close().unwrap();
    println!("devices passed");
}

fn collectives(dev: &Device, len: usize) -> Result<()> {
    let world = dev.world()?;
    let (me, n) = (world.rank(), world.count());
    let all: Vec<Vec<f32>> = (0..n).map(|rank| numbers(rank, len)).collect();
    let sum: Vec<f32> = (0..len).map(|i| all.iter().map(|own| own[i]).sum()).collect();
    let mut x = dev.upload(&numbers(me, len))?;
    world.all_reduce(&mut x, ReduceOp::Sum)?;
    assert_eq!(dev.download(&x)?, sum);
    let (own, mut all) = (dev.upload(&numbers(me, len))?, dev.zeros(n * len)?);
    world.all_gather(&own, &mut all)?;
    assert_eq!(dev.download(&all)?, (0..n).flat_map(|rank| numbers(rank, len)).collect::<Vec<_>>());
    let (from, mut swapped) = (dev.upload(&numbers(me, n * len))?, dev.zeros(n * len)?);
    world.all_to_all(&from, &mut swapped)?;
    let part = |rank: usize| numbers(rank, n * len)[me * len..(me + 1) * len].to_vec();
    assert_eq!(dev.download(&swapped)?, (0..n).flat_map(part).collect::<Vec<_>>());
    // The last device of rank 1 has another ordinal than any of rank 0.
    let pair = [0, 2];
    if pair.contains(&me) {
        let group = world.group(&pair)?;
        let mut told = dev.upload(&numbers(me, len))?;
        group.broadcast(&mut told, 1)?;
        assert_eq!(dev.download(&told)?, numbers(2, len));
    }
    let mut gathered = dev.zeros(n * 3)?;
    world.gather(&dev.upload(&numbers(me, 3))?, (me == 1).then(|| gathered.view_mut()), 1)?;
    let wanted: Vec<f32> = (0..n).flat_map(|rank| if me == 1 { numbers(rank, 3) } else { vec![0.0; 3] }).collect();
    assert_eq!(dev.download(&gathered)?, wanted);
    let (whole, mut mine) = (dev.upload(&numbers(9, 2 * n))?, dev.zeros(2)?);
    world.scatter((me == 0).then(|| whole.view()), &mut mine, 0)?;
    assert_eq!(dev.download(&mine)?, numbers(9, 2 * n)[2 * me..2 * me + 2]);
    world.barrier()
}
