//! What runs when, and where.

use crate::{
    on_both,
    support::{Gpus, MODULE, cases, guarded, slow_add, until},
};
use gpu_pool::{
    AsViewMut, DeviceBuffer, GpuPool, LaunchDims, ReduceOp, Result, kernel,
    tasks::{TaskTrace, Value},
};
use gpu_pool_lab::Explorer;
use proptest::prelude::*;
use serde_json::Value as Json;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

/// A random program over integers: `x[a] = 3 x[a] + x[b]`, at a place.
type Step = (usize, usize, usize);
const VALUES: usize = 5;

fn programs() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((0..VALUES, 0..VALUES, 0..4usize), 0..60)
}

fn step(x: &mut u64, y: &u64) -> Result<()> {
    *x = x.wrapping_mul(3).wrapping_add(*y);
    Ok(())
}

fn serial(program: &[Step]) -> Vec<u64> {
    let mut values: Vec<u64> = (0..VALUES as u64).collect();
    for &(a, b, _) in program.iter().filter(|(a, b, _)| a != b) {
        let y = values[b];
        step(&mut values[a], &y).unwrap();
    }
    values
}

fn as_tasks(pool: &GpuPool, program: &[Step]) -> Result<Vec<u64>> {
    pool.tasks(|t| {
        let mut values: Vec<_> = (0..VALUES as u64).map(|i| t.cpu().run((), move |()| Ok(i))).collect();
        for &(a, b, place) in program.iter().filter(|(a, b, _)| a != b) {
            let [x, y] = values.get_disjoint_mut([a, b]).unwrap();
            let _ = match place < t.device_count() {
                true => t.gpu(place).run((x, &*y), |_, (x, y)| step(x, y)),
                false => t.cpu().run((x, &*y), |(x, y)| step(x, y)),
            };
        }
        values.iter().map(|value| t.get(value)).collect()
    })
}

/// MXNet's RandSumExpr: random programs give what one thread gives.
#[test]
fn random_programs_behave_as_if_run_one_by_one() {
    guarded(|| {
        let pool = Gpus::software().pool(3);
        let config = ProptestConfig { cases: cases(50, 2000), failure_persistence: None, ..Default::default() };
        proptest!(config, |(program in programs())| {
            prop_assert_eq!(as_tasks(&pool, &program).unwrap(), serial(&program));
        });
    });
}

/// The same with work on devices: `x[a] += x[b]`, on the device of `a` or as copies between devices.
fn on_devices(pool: &GpuPool, program: &[Step]) -> Result<Vec<f32>> {
    pool.tasks(|t| {
        let home = |i: usize| i % t.device_count();
        let mut values: Vec<Value<DeviceBuffer<f32>>> =
            (0..VALUES).map(|i| t.gpu(home(i)).run((), move |dev, ()| dev.upload(&[i as f32; 33]))).collect();
        for &(a, b, way) in program.iter().filter(|(a, b, _)| a != b) {
            let [x, y] = values.get_disjoint_mut([a, b]).unwrap();
            let to = t.gpu(home(a));
            let y = match way {
                0 => to.copy(y),
                1 => to.upload(&t.gpu(home(b)).download(y)),
                2 => {
                    let half = t.cpu().run((&t.gpu(home(b)).download(y),), |(y,)| Ok(y.as_slice()?.to_vec()));
                    to.upload(&half)
                }
                _ => to.run((&*y,), |dev, (y,)| y.copy_to(dev)),
            };
            let _ = to.run((x, y), |dev, (x, y)| {
                dev.scale(x, 0.5)?;
                dev.axpy(1.0, &y, x)
            });
        }
        let found: Vec<_> = (0..VALUES).map(|i| t.gpu(home(i)).download(&values[i])).collect();
        found.iter().map(|host| t.read(host, |host| Ok(host.as_slice()?[32]))?).collect()
    })
}

fn on_one_thread(program: &[Step]) -> Vec<f32> {
    let mut values: Vec<f32> = (0..VALUES).map(|i| i as f32).collect();
    for &(a, b, _) in program.iter().filter(|(a, b, _)| a != b) {
        values[a] = values[a] * 0.5 + values[b];
    }
    values
}

/// A fixed program for tests that cannot draw one.
fn program(len: usize) -> Vec<Step> {
    let mut state = 7u64;
    let mut draw = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n as usize
    };
    (0..len).map(|_| (draw(VALUES as u64), draw(VALUES as u64), draw(4))).collect()
}

on_both! {
    2: fn copies_and_kernels_come_in_order(gpus) {
        let (pool, program) = (gpus.pool(2), program(60));
        for _ in 0..cases(3, 30) {
            assert_eq!(on_devices(&pool, &program).unwrap(), on_one_thread(&program));
        }
    }

    /// MXNet's test_model_parallel.py, `test_chain`: a chain over two devices, with the copies in between.
    2: fn a_chain_over_devices(gpus) {
        let pool = gpus.pool(2);
        let found = pool.tasks(|t| {
            let mut x = t.gpu(0).run((), |dev, ()| dev.upload(&[1.0f32; 1000]));
            for i in 0..10 {
                let there = t.gpu((i + 1) % 2).copy(&x);
                x = t.gpu((i + 1) % 2).run((there,), |dev, (mut there,)| {
                    dev.scale(&mut there, 2.0)?;
                    Ok(there)
                });
            }
            let host = t.gpu(0).download(&x);
            t.read(&host, |host| host.as_slice().map(<[f32]>::to_vec))?
        });
        assert_eq!(found.unwrap(), [1024.0; 1000]);
    }

    /// MXNet's test_kvstore.py, `test_aggregator`: push from each device, add up, pull to each device.
    2: fn a_key_value_store(gpus) {
        let pool = gpus.pool(2);
        let found = pool.tasks(|t| {
            let mut stored = t.cpu().run((), |()| Ok(vec![1.0f32; 64]));
            let mut pulled = Vec::new();
            for _ in 0..3 {
                let pushed: Vec<_> = (0..2).map(|i| {
                    let gradient = t.gpu(i).run((), move |dev, ()| dev.upload(&[i as f32 + 1.0; 64]));
                    t.gpu(i).download(&gradient)
                }).collect();
                let _ = t.cpu().run((&mut stored, &pushed[..]), |(stored, pushed)| {
                    for part in pushed {
                        stored.iter_mut().zip(part.as_slice()?).for_each(|(x, y)| *x += y);
                    }
                    Ok(())
                });
                pulled = (0..2).map(|i| t.gpu(i).upload(&stored)).collect();
            }
            let all: Vec<_> = (0..2)
                .map(|i| t.gpu(i).run((&pulled[i],), |dev, (x,)| dev.download(x)))
                .collect();
            all.iter().map(|value| t.get(value)).collect::<Result<Vec<_>>>()
        });
        assert_eq!(found.unwrap(), [vec![10.0; 64], vec![10.0; 64]]);
    }

    /// MXNet's test_multi_device_exec.py, `test_ctx_group`: parts of one model on different devices, and a result that
    /// needs both.
    2: fn parts_of_a_model_on_different_devices(gpus) {
        let pool = gpus.pool(2);
        let input: Vec<f32> = (0..64).map(|i| i as f32).collect();
        let found = pool.tasks(|t| {
            let parts: Vec<_> = (0..2).map(|i| {
                let half = &input[32 * i..][..32];
                t.gpu(i).run((), move |dev, ()| {
                    let mut x = dev.upload(half)?;
                    dev.scale(&mut x, i as f32 + 1.0)?;
                    dev.sum(&x)
                })
            }).collect();
            let there = t.gpu(0).copy(&parts[1]);
            let sum = t.gpu(0).run((&parts[0], there), |dev, (x, mut y)| {
                dev.axpy(1.0, x, &mut y)?;
                dev.download(&y)
            });
            t.get(&sum)
        });
        assert_eq!(found.unwrap(), [496.0 + 2.0 * 1520.0]);
    }

    /// Collectives in tasks, in one order on all devices: each device's buffer orders its own.
    2: fn collectives_chained_on_their_buffers(gpus) {
        let pool = gpus.pool(2);
        let found = pool.tasks(|t| {
            let mut parts: Vec<_> =
                (0..2).map(|i| t.gpu(i).run((), move |dev, ()| dev.upload(&[i as f32 + 1.0; 8]))).collect();
            for _ in 0..5 {
                for (i, part) in parts.iter_mut().enumerate() {
                    let _ = t.gpu(i).run((part,), |dev, (x,)| dev.all_reduce(x, ReduceOp::Sum));
                }
            }
            let first = t.gpu(0).run((&parts[0],), |dev, (x,)| dev.download(x));
            t.get(&first)
        });
        assert_eq!(found.unwrap(), [3.0 * 16.0; 8]);
    }
}

static OPEN: AtomicBool = AtomicBool::new(false);

kernel! {
    /// Ends when the host says so.
    static HOLD: "hold" in MODULE, fn(_x: &mut [u32]) |_dims| {
        while !OPEN.load(SeqCst) {
            std::thread::yield_now();
        }
    }
}

/// A copy starts when its source is made, not when later work of the device's main stream is over. The events were
/// recorded when the tasks ended; an event that was recorded late would cover the kernel, which waits for this copy.
#[test]
fn a_copy_does_not_wait_for_later_work() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let found = pool.tasks(|t| {
            let x = t.gpu(0).run((), |dev, ()| dev.upload(&[5u32; 256]));
            let mut y = t.gpu(0).run((), |dev, ()| dev.zeros::<u32>(1));
            let submitted = Arc::new(AtomicBool::new(false));
            let tell = submitted.clone();
            let _ = t.gpu(0).run((&mut y,), move |dev, (y,)| {
                // SAFETY: the kernel touches nothing.
                unsafe { dev.launch(&HOLD, LaunchDims::cover(1), (y.view_mut(),)) }?;
                tell.store(true, SeqCst);
                Ok(())
            });
            until("the kernel is in the stream", || submitted.load(SeqCst))?;
            // To the host and to a peer.
            let found = [t.gpu(0).download(&x), t.gpu(1).download(&t.gpu(1).copy(&x))];
            let found = found.each_ref().map(|host| t.read(host, |host| host.as_slice().map(|host| host[255])));
            OPEN.store(true, SeqCst);
            for found in found {
                assert_eq!(found??, 5);
            }
            Ok(())
        });
        found.unwrap();
    });
}

/// MXNet's naive and threaded engines agree in every interleaving; here under the race checker.
#[test]
fn explored_interleavings() {
    guarded(|| {
        let program = program(12);
        let expected = on_one_thread(&program);
        let explorer = Explorer::new().devices(2).seeds(cases(5, 100));
        let run = explorer.run(|pool| {
            assert_eq!(on_devices(pool, &program)?, expected);
            Ok(())
        });
        run.unwrap_or_else(|failure| panic!("{failure}"));
    });
}

/// What a device submits does not depend on the speed of threads, so a failing run can be repeated.
#[test]
fn an_explored_run_repeats() {
    guarded(|| {
        let program = program(8);
        let explorer = Explorer::new().devices(2).seeds(1).first_seed(3).without_shrinking();
        let fails = |pool: &GpuPool| {
            on_devices(pool, &program)?;
            Err(gpu_pool::Error::custom("to see the trace"))
        };
        let first = explorer.run(fails).unwrap_err();
        let again = explorer.clone().replay(first.choices()).run(fails).unwrap_err();
        let steps = |failure: &gpu_pool_lab::Failure| {
            failure.trace().steps().iter().map(|step| (step.device, step.stream)).collect::<Vec<_>>()
        };
        assert_eq!(steps(&first), steps(&again));
    });
}

/// Four tasks meet: none could end if another one had to run before or after it.
#[test]
fn independent_tasks_run_at_once() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let inside = AtomicUsize::new(0);
        let meet = || {
            inside.fetch_add(1, SeqCst);
            until("all four are inside", || inside.load(SeqCst) == 4)
        };
        pool.tasks_in(&threads, |t| {
            for i in 0..2 {
                let _ = t.gpu(i).run((), |_, ()| meet());
                let _ = t.cpu().run((), |()| meet());
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(inside.load(SeqCst), 4);
    });
}

/// Readers of one value run at once; a writer waits for all of them.
#[test]
fn one_writer_or_many_readers() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let (inside, written) = (AtomicUsize::new(0), AtomicBool::new(false));
        pool.tasks(|t| {
            let mut x = t.cpu().run((), |()| Ok(1));
            for i in 0..2 {
                let _ = t.gpu(i).run((&x,), |_, (x,)| {
                    assert_eq!((*x, written.load(SeqCst)), (1, false));
                    inside.fetch_add(1, SeqCst);
                    until("both read", || inside.load(SeqCst) == 2)
                });
            }
            let _ = t.gpu(0).run((&mut x,), |_, (x,)| {
                written.store(true, SeqCst);
                *x += 1;
                Ok(())
            });
            assert_eq!(t.get(&x)?, 2);
            Ok(())
        })
        .unwrap();
    });
}

/// A device does not wait for one task while it could start another one.
#[test]
fn a_task_that_waits_lets_others_pass() {
    guarded(|| {
        let pool = Gpus::software().pool(1);
        let open = AtomicBool::new(false);
        pool.tasks(|t| {
            let slow = t.cpu().run((), |()| until("the other task has run", || open.load(SeqCst)));
            let _ = t.gpu(0).run((&slow,), |_, (_,)| Ok(()));
            let _ = t.gpu(0).run((), |_, ()| {
                open.store(true, SeqCst);
                Ok(())
            });
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn a_value_is_freed_when_its_last_reader_is_over() {
    guarded(|| {
        let pool = Gpus::software().pool(1);
        pool.tasks(|t| {
            let x = t.cpu().run((), |()| Ok(Arc::new(())));
            let held = t.get(&x)?;
            let stop = Arc::new(AtomicBool::new(false));
            let seen = stop.clone();
            let reader = t.gpu(0).run((&x,), move |_, (x,)| {
                until("the value is dropped", || seen.load(SeqCst))?;
                Ok(Arc::strong_count(x))
            });
            drop(x);
            assert_eq!(Arc::strong_count(&held), 2, "a task needs it");
            stop.store(true, SeqCst);
            assert_eq!(t.get(&reader)?, 2);
            assert_eq!(Arc::strong_count(&held), 1);
            // A buffer, too, although nobody looks at it.
            let in_use = |t: &gpu_pool::tasks::Tasks<'_, '_>| {
                let bytes = t.gpu(0).run((), |dev, ()| Ok(dev.stats().in_use));
                t.get(&bytes)
            };
            let before = in_use(t)?;
            let buffer = t.gpu(0).run((), |dev, ()| dev.zeros::<u8>(1 << 20));
            let sum = t.gpu(0).run((&buffer,), |_, (buffer,)| Ok(buffer.len()));
            drop(buffer);
            t.get(&sum)?;
            assert_eq!(in_use(t)?, before);
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn a_value_can_be_given_to_a_task_and_taken_by_the_caller() {
    let pool = Gpus::software().pool(1);
    let found = pool.tasks(|t| {
        let x = t.cpu().run((), |()| Ok(vec![1, 2]));
        let mut y = t.cpu().run((x,), |(mut x,)| {
            x.push(3);
            Ok(x)
        });
        t.take(&mut y)
    });
    assert_eq!(found.unwrap(), [1, 2, 3]);
}

/// A task that submits nothing may pass on a value whose work is not over: a reader waits for that work.
#[test]
fn a_task_without_work_of_its_own_keeps_the_order() {
    guarded(|| {
        let pool = Gpus::software().pool(1);
        let found = pool.tasks(|t| {
            let x = t.gpu(0).run((), |dev, ()| {
                let mut x = dev.zeros::<u32>(8)?;
                slow_add(dev, &mut x, 1, 100_000)?;
                Ok((x, dev.record()?))
            });
            let y = t.gpu(0).run((x,), |_, (x,)| Ok(x));
            t.read(&y, |(_, event)| event.is_complete())?
        });
        assert!(found.unwrap());
    });
}

/// The calling thread is the only thread of the pool that runs the CPU's tasks.
#[test]
fn a_caller_on_the_only_thread_of_its_pool() {
    guarded(|| {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let pool = Gpus::software().pool(2);
        let found = threads.install(|| {
            pool.tasks_in(&threads, |t| {
                let x = t.cpu().run((), |()| Ok(20));
                let y = t.gpu(1).run((&x,), |_, (x,)| Ok(x + 1));
                let z = t.cpu().run((&y,), |(y,)| Ok(y * 2));
                t.get(&z)
            })
        });
        assert_eq!(found.unwrap(), 42);
    });
}

#[test]
fn a_trace_has_the_graph_and_the_times() {
    let pool = Gpus::software().pool(2);
    let trace = TaskTrace::new();
    pool.tasks(|t| {
        t.trace(&trace);
        let mut x = t.gpu(0).named("x").run((), |dev, ()| dev.upload(&[1.0f32; 8]));
        let y = t.gpu(1).named("y <- x").copy(&x);
        let _ = t.gpu(0).named("x *= 2").run((&mut x,), |dev, (x,)| dev.scale(x, 2.0));
        let host = t.gpu(1).download(&y);
        let _ = t.cpu().named("look").run((&host,), |(host,)| Ok(host.as_slice()?[0]));
        Ok(())
    })
    .unwrap();
    assert_eq!(trace.len(), 5);
    let file: Json = serde_json::from_str(&trace.to_chrome_trace()).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let of = |phase: &'static str| events.iter().filter(move |event| event["ph"] == *phase);
    // Tasks are looked up by number: the clocks of two devices differ a little, so their boxes may change places.
    let places = ["GPU 0", "GPU 1 copy", "GPU 0", "GPU 1 download", "CPU"];
    let names = ["x", "y <- x", "x *= 2", "order.rs:", "look"];
    for (number, (place, name)) in places.into_iter().zip(names).enumerate() {
        let found = of("X").find(|event| event["args"]["task"] == number).unwrap();
        assert!(found["name"].as_str().unwrap().contains(name), "{found}");
        assert!(found["dur"].as_f64().unwrap() >= 0.0);
        let own = |event: &&Json| event["name"] == "thread_name" && event["tid"] == found["tid"];
        assert_eq!(of("M").find(own).unwrap()["args"]["name"], place, "{name}");
    }
    let arrows = of("f").map(|event| (event["name"].as_str().unwrap(), event["cat"].as_str().unwrap()));
    let mut arrows: Vec<_> = arrows.collect();
    arrows.sort_unstable();
    let data = |name| (name, "data");
    let expected = [data("t0 -> t1"), data("t0 -> t2"), ("t1 -> t2", "order"), data("t1 -> t3"), data("t3 -> t4")];
    assert_eq!(arrows, expected);
    // Each arrow begins where it ends: at a box of the task that its name has.
    for (from, to) in of("s").zip(of("f")) {
        assert_eq!(from["id"], to["id"]);
        let numbers: Vec<&str> = from["name"].as_str().unwrap().split(" -> ").collect();
        for (end, number) in [(from, numbers[0]), (to, numbers[1])] {
            let task = of("X").find(|event| format!("t{}", event["args"]["task"]) == number).unwrap();
            assert_eq!((&end["tid"], &end["ts"]), (&task["tid"], &task["ts"]));
        }
    }
}
