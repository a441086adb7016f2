//! Safe code orders itself, so the checker has nothing to say about it: programs drawn at random, in which several
//! threads of the application start scopes on some of the devices, and buffers, page-locked memory and events go from
//! anywhere to anywhere by means that the crate cannot see. With and without faults, lost devices, and little memory.

use gpu_pool::{
    Device, DeviceBuffer, Error, Event, GpuPool, PinnedBuffer, ReduceOp, Result, extend::driver::host::ExecutionOrder,
};
use gpu_pool_lab::{Check, FaultPlan, prelude::*};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::{sync::Arc, thread};

/// A generator of its own, since each thread needs one.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % sides
    }

    fn take<T>(&mut self, from: &Mutex<Vec<T>>) -> Option<T> {
        let mut from = from.lock();
        let at = self.roll(from.len().max(1));
        if from.is_empty() { None } else { Some(from.swap_remove(at)) }
    }
}

/// What is on its way between threads.
#[derive(Default)]
struct Bag {
    own: Mutex<Vec<DeviceBuffer<f32>>>,
    shared: Mutex<Vec<Arc<DeviceBuffer<f32>>>>,
    pinned: Mutex<Vec<PinnedBuffer<f32>>>,
    events: Mutex<Vec<Event>>,
}

fn size(dice: &mut Dice) -> usize {
    [0, 1, 64, 100, 1000, 100_000, 400_000, 1_000_000][dice.roll(8)]
}

/// A step that one device takes by itself.
fn step(dev: &Device, dice: &mut Dice, bag: &Bag) -> Result<()> {
    let streams = [dev.stream()?, dev.stream()?];
    let on = dev.on(&streams[dice.roll(2)]);
    let dev = if dice.roll(3) == 0 { dev } else { &*on };
    let here = |x: &DeviceBuffer<f32>| x.device() == dev.index();
    match dice.roll(16) {
        0 => bag.own.lock().push(dev.zeros(size(dice))?),
        1 => bag.own.lock().push(dev.upload(&vec![1.0; size(dice)])?),
        2 => {
            let n = size(dice);
            // SAFETY: written at once.
            let mut x = unsafe { dev.uninit::<f32>(n) }?;
            let (mut a, mut b) = x.split_at_mut(n / 2);
            dev.on(&streams[0]).fill(&mut a, 1.0)?;
            dev.on(&streams[1]).fill(&mut b, 2.0)?;
            bag.own.lock().push(x);
        }
        3 => {
            if let Some(mut x) = dice.take(&bag.own) {
                if here(&x) {
                    dev.scale(&mut x, 0.5)?;
                    let half = x.len() / 2;
                    dev.on(&streams[1]).fill(&mut x.slice_mut(half..), 3.0)?;
                }
                bag.shared.lock().push(Arc::new(x));
            }
        }
        4 | 5 => {
            if let Some(x) = dice.take(&bag.shared) {
                bag.shared.lock().push(x.clone());
                let y = x.copy_to(dev)?;
                bag.own.lock().push(y);
            }
        }
        6 => {
            if let Some(x) = dice.take(&bag.shared) {
                match Arc::try_unwrap(x) {
                    Ok(x) => bag.own.lock().push(x),
                    Err(x) => drop(thread::spawn(move || drop(x)).join()),
                }
            }
        }
        7 => {
            if let Some(x) = dice.take(&bag.own).filter(here) {
                dev.download(&dev.sum(&x)?)?;
                bag.own.lock().push(x);
            }
        }
        8 => {
            let x = dice.take(&bag.own);
            thread::spawn(move || drop(x));
        }
        9 => {
            let mut p = dice.take(&bag.pinned).map_or_else(|| dev.pinned(1000), Ok)?;
            match dice.roll(4) {
                0 => bag.own.lock().push(dev.upload_pinned(&p)?),
                1 => dev.download_pinned(&dev.zeros(1000)?, &mut p)?,
                2 => drop(p.as_slice()?),
                _ => p.as_mut_slice()?.fill(1.0),
            }
            if dice.roll(4) > 0 {
                bag.pinned.lock().push(p);
            }
        }
        10 => bag.events.lock().push(dev.record()?),
        11 => bag.events.lock().push(dev.record_timed()?),
        12 => {
            if let Some(event) = dice.take(&bag.events) {
                if dice.roll(2) == 0 {
                    dev.wait(&event)?;
                } else {
                    event.is_complete()?;
                }
            }
        }
        13 => dev.synchronize()?,
        14 => {
            if let (Some(x), Some(mut y)) = (dice.take(&bag.shared), dice.take(&bag.own)) {
                let n = x.len().min(y.len());
                if here(&x) || here(&y) {
                    dev.copy(&x.slice(..n).peer(), &mut y.slice_mut(..n))?;
                }
                bag.shared.lock().push(x);
                bag.own.lock().push(y);
            }
        }
        _ => {
            if let Some(x) = dice.take(&bag.shared).filter(|x| here(x)) {
                dev.download(&*x)?;
                bag.shared.lock().push(x);
            }
        }
    }
    Ok(())
}

/// What all members do together.
fn together(dev: &Device, dice: &mut Dice) -> Result<()> {
    let n = size(dice).min(100_000) + 1;
    match dice.roll(3) {
        0 => dev.barrier(),
        1 => dev.all_reduce(&mut dev.zeros::<f32>(n)?, ReduceOp::Sum),
        _ => {
            let all = dev.exchange(Arc::new(dev.zeros::<f32>(n)?))?;
            all[(dev.rank() + 1) % dev.count()].copy_to(dev).map(drop)
        }
    }
}

/// What a program may meet that does nothing wrong.
fn is_fair(error: &Error) -> bool {
    use Error::*;
    matches!(error, Custom(_) | OutOfMemory { .. } | Driver { .. } | DeviceLost { .. } | Aborted { .. })
}

fn scopes(pool: &GpuPool, seed: u64, bag: &Bag) {
    let mut dice = Dice::new(seed);
    let mut held = Vec::new();
    let Ok(mut table) = pool.unified::<f32>(100) else { return };
    for _ in 0..4 {
        let first = dice.roll(pool.device_count());
        let members: Vec<usize> = (first..pool.device_count()).collect();
        let (common, fails) = (dice.roll(1 << 20) as u64, dice.roll(5) == 0);
        let result = pool.on(&members).run(|dev, _| {
            let mut ours = Dice::new(common);
            let mut mine = Dice::new(common + 1 + dev.rank() as u64);
            for i in 0..12 {
                match step(dev, &mut mine, bag) {
                    Err(Error::OutOfMemory { .. }) => bag.own.lock().clear(),
                    other => other?,
                }
                if fails && i == 7 && dev.rank() == 0 {
                    return Err(Error::custom("enough"));
                }
                if i % 4 == 3 {
                    together(dev, &mut ours)?;
                }
            }
            Ok(())
        });
        match result {
            Ok(_) => {}
            Err(error) => assert!(is_fair(&error), "seed {seed}: {error}"),
        }
        let doubled = pool.with(table.rows_mut(10)).run(|dev, _, mut rows| dev.scale(&mut rows, 2.0)).map(drop);
        let seen = doubled.and_then(|()| table.as_slice().map(drop));
        if let Err(error) = seen.and_then(|()| table.as_mut_slice().map(|rows| rows.fill(1.0))) {
            assert!(is_fair(&error), "seed {seed}: {error}");
        }
        if let Some(mut p) = dice.take(&bag.pinned) {
            match p.as_mut_slice() {
                Ok(p) => p.fill(2.0),
                Err(error) => assert!(is_fair(&error), "seed {seed}: {error}"),
            }
            held.push(p);
        }
        bag.pinned.lock().extend(held.pop().filter(|_| dice.roll(2) == 0));
        drop(dice.take(&bag.own));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn safe_programs(
        seed: u64,
        devices in 1_usize..4,
        settings: [bool; 3],
        fault in prop::sample::select(vec!["", "*:any:p0.01:error", "*:any:p0.001:lost"]),
        threads in 1_u64..4,
    ) {
        let plan = format!("seed={seed}; {fault}").parse::<FaultPlan>().unwrap().paused();
        let mut builder = GpuPool::builder().host(devices).check(Check::Races).faults(plan.clone());
        let [staged, tight, seeded] = settings;
        if staged {
            builder = builder.without_peer_access();
        }
        if tight {
            builder = builder.memory_limit(20 << 20);
        }
        if seeded {
            builder = builder.schedule(ExecutionOrder::Seeded(seed));
        }
        let pool = builder.build().unwrap();
        let bag = Bag::default();
        plan.resume();
        thread::scope(|s| {
            for i in 0..threads {
                let (pool, bag) = (&pool, &bag);
                s.spawn(move || scopes(pool, seed.wrapping_add(i), bag));
            }
        });
        plan.pause();
        if pool.report().lost.contains(&true)
            && let Ok(rest) = pool.survivors()
        {
            scopes(&rest, seed, &Bag::default());
            rest.close().unwrap();
        }
        if seed % 2 == 0 {
            drop(bag);
            pool.close().unwrap();
        } else {
            thread::spawn(move || pool.close().unwrap()).join().unwrap();
            drop(bag);
        }
    }
}
