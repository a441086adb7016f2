//! Each kind of mismatch at known lines: every member's error names both members' own calls and places.

use crate::{
    on_both, rig,
    rig::{Way, assert_works, mismatch},
};
use gpu_pool::{Device, Error, GpuPool, ReduceOp::*, gradients::GradientExchange};
use std::sync::Mutex;

/// What a member has called: the operation, the line, and what came of it.
struct Called {
    op: &'static str,
    line: u32,
    result: Result<(), Error>,
}

/// A call in one line.
macro_rules! call {
    ($op:literal, $call:expr) => {
        Called { op: $op, line: line!(), result: $call.map(drop) }
    };
}

/// What a member does, which may be the odd one.
type Kind = fn(&Device, bool) -> Result<Called, Error>;

#[rustfmt::skip]
const KINDS: [(&str, Kind); 17] = [
    ("operation", |dev, odd| {
        let mut x = dev.zeros::<f32>(12)?;
        Ok(match odd {
            false => call!("all_reduce", dev.all_reduce(&mut x, Sum)),
            true => call!("broadcast", dev.broadcast(&mut x, 0)),
        })
    }),
    // By headlines, which are no more than numbers.
    ("operation", |dev, odd| Ok(match odd {
        false => call!("barrier", dev.barrier()),
        true => call!("all_reduce", dev.all_reduce(&mut dev.zeros::<f32>(12)?, Sum)),
    })),
    ("operation", |dev, odd| Ok(match odd {
        false => call!("barrier", dev.barrier()),
        true => call!("exchange", dev.exchange(7)),
    })),
    ("dtype", |dev, odd| Ok(match odd {
        false => call!("exchange", dev.exchange(7u32)),
        true => call!("exchange", dev.exchange("seven")),
    })),
    ("dtype", |dev, odd| Ok(match odd {
        false => call!("all_reduce", dev.all_reduce(&mut dev.zeros::<f32>(12)?, Sum)),
        true => call!("all_reduce", dev.all_reduce(&mut dev.zeros::<u32>(12)?, Sum)),
    })),
    ("count", |dev, odd| Ok(match odd {
        false => call!("all_reduce", dev.all_reduce(&mut dev.zeros::<f32>(12)?, Sum)),
        true => call!("all_reduce", dev.all_reduce(&mut dev.zeros::<f32>(13)?, Sum)),
    })),
    ("reduce op", |dev, odd| Ok(match odd {
        false => call!("reduce", dev.reduce(&mut dev.zeros::<f32>(12)?, Sum, 0)),
        true => call!("reduce", dev.reduce(&mut dev.zeros::<f32>(12)?, Min, 0)),
    })),
    ("root", |dev, odd| Ok(match odd {
        false => call!("broadcast", dev.broadcast(&mut dev.zeros::<f32>(12)?, 0)),
        true => call!("broadcast", dev.broadcast(&mut dev.zeros::<f32>(12)?, 1)),
    })),
    // What one sends is not what the other receives.
    ("counts", |dev, odd| {
        let (n, x, mut y) = (dev.count(), dev.zeros::<f32>(4 * dev.count())?, dev.zeros::<f32>(4 * dev.count())?);
        let (four, mut other) = (vec![4; n], vec![4; n]);
        other[(dev.rank() + 1) % n] = 3;
        Ok(match odd {
            false => call!("all_to_all_v", dev.all_to_all_v(&x, &four, &mut y, &four)),
            true => call!("all_to_all_v", dev.all_to_all_v(&x.slice(1..), &other, &mut y, &four)),
        })
    }),
    ("counts", |dev, odd| {
        let (mut x, mut y) = (dev.zeros::<f32>(3)?, dev.zeros::<f32>(4)?);
        Ok(match odd {
            false => call!("all_reduce_many", dev.all_reduce_many(&mut [&mut x, &mut y], Sum)),
            true => call!("all_reduce_many", dev.all_reduce_many(&mut [&mut y, &mut x], Sum)),
        })
    }),
    ("group", |dev, odd| {
        let all = dev.group(&(0..dev.count()).rev().collect::<Vec<_>>())?;
        Ok(match odd {
            false => call!("barrier", all.barrier()),
            true => call!("barrier", dev.barrier()),
        })
    }),
    ("capture", |dev, odd| {
        let mut x = dev.zeros::<f32>(12)?;
        if odd {
            return Ok(call!("all_reduce", dev.all_reduce(&mut x, Sum)));
        }
        let mut called = None;
        let _ = dev.capture(|dev| {
            called = Some(call!("all_reduce", dev.all_reduce(&mut x, Sum)));
            Ok(())
        });
        Ok(called.unwrap())
    }),
    // Where kernels cannot meet, the graph is cut, and the collective is carried out as if it were called then: its
    // place is in the capture.
    ("graph", |dev, odd| {
        let (mut x, mut y) = (dev.zeros::<f32>(12)?, dev.zeros::<f32>(12)?);
        let (mut first, mut second) = (0, 0);
        let one = dev.capture(|dev| {
            dev.fill(&mut x, 1.0)?;
            { first = line!(); dev.all_reduce(&mut x, Sum)? };
            dev.fill(&mut x, 1.0)
        })?.0;
        let two = dev.capture(|dev| {
            dev.fill(&mut y, 1.0)?;
            { second = line!(); dev.all_reduce(&mut y, Sum)? };
            dev.fill(&mut y, 1.0)
        })?.0;
        Ok(match (odd, one.parts()) {
            (false, 1) => call!("launch_graph", dev.launch_graph(&one)),
            (true, 1) => call!("launch_graph", dev.launch_graph(&two)),
            (false, _) => Called { op: "all_reduce", line: first, result: dev.launch_graph(&one) },
            (true, _) => Called { op: "all_reduce", line: second, result: dev.launch_graph(&two) },
        })
    }),
    ("count", |dev, odd| {
        let builder = GradientExchange::<f32>::builder();
        Ok(match odd {
            false => call!("GradientExchange", builder.build(dev, &[3, 4])),
            true => call!("GradientExchange", builder.build(dev, &[3])),
        })
    }),
    // A bucket of a step, which `ready` starts.
    ("operation", |dev, odd| {
        let mut gradients = GradientExchange::builder().build(dev, &[4])?;
        Ok(match odd {
            false => call!("all_reduce", gradients.ready(dev, 0)),
            true => call!("barrier", dev.barrier()),
        })
    }),
    ("step", |dev, odd| {
        let mut gradients = GradientExchange::builder().build(dev, &[4])?;
        if odd {
            // This one begins anew, by itself.
            gradients.ready(dev, 0)?;
            gradients.finish(dev)?;
            gradients.reset(dev)?;
            return Ok(call!("all_reduce", gradients.ready(dev, 0)));
        }
        gradients.ready(dev, 0)?;
        gradients.finish(dev)?;
        Ok(call!("all_reduce", gradients.ready(dev, 0)))
    }),
    ("parameters", |dev, odd| {
        let gradients = GradientExchange::<f32>::builder().build(dev, &[4])?;
        let x = [dev.upload(&[f32::from(u8::from(odd)); 4])?];
        Ok(match odd {
            false => call!("parameter", gradients.verify_parameters(dev, &x)),
            true => call!("parameter", gradients.verify_parameters(dev, &x)),
        })
    }),
];

/// What each member has called in a scope, and the line of that.
fn told(pool: &GpuPool, kind: impl Fn(&Device) -> Result<Called, Error> + Sync) -> (Vec<Called>, u32) {
    let called: Vec<_> = (0..pool.device_count()).map(|_| Mutex::new(None)).collect();
    let line = line!() + 1;
    let _ = pool.run(|dev, _| {
        *called[dev.rank()].lock().unwrap() = Some(kind(dev)?);
        Ok(())
    });
    let all = called.into_iter().enumerate().map(|(device, called)| {
        called.into_inner().unwrap().unwrap_or_else(|| panic!("device {device} has failed before"))
    });
    (all.collect(), line)
}

/// The mismatch that a member was told of, or that has aborted it.
fn root(error: Error) -> Error {
    if let Error::Aborted { cause, .. } = error { (*cause).clone() } else { error }
}

#[track_caller]
fn assert_names_both(what: &str, all: &[Called], odd: usize, error: &Error) {
    let found = mismatch(Err::<(), _>(root(error.clone())));
    assert_eq!(found.what, what, "{}", found.text);
    assert_ne!(found.a.0, found.b.0, "{}", found.text);
    assert!([found.a.0, found.b.0].contains(&odd), "{}", found.text);
    for (device, call, site) in [&found.a, &found.b] {
        let Called { op, line, .. } = all[*device];
        assert!(call.contains(op), "device {device} called {op}: {}", found.text);
        assert_eq!((site.file(), site.line()), (file!(), line), "device {device}: {}", found.text);
    }
}

on_both! {
    2: fn every_kind_names_each_members_own_place(gpus) {
        for way in [Way::Default, Way::Watched, Way::Staged] {
            let n = gpus.up_to(3);
            let pool = way.pool(gpus, n);
            for (number, (what, kind)) in KINDS.iter().enumerate() {
                for odd in [0, n - 1] {
                    println!("{way:?}, {what} ({number}), member {odd} differs");
                    let (all, _) = told(&pool, |dev| kind(dev, dev.rank() == odd));
                    for called in &all {
                        assert_names_both(what, &all, odd, called.result.as_ref().unwrap_err());
                    }
                }
            }
            assert_works(&pool);
        }
    }

    // A member that has left has its last call, wherever the one that waits for it is.
    2: fn who_has_left_is_named_with_its_own_place(gpus) {
        let pool = rig::pool(gpus, 2);
        type Last = fn(&Device) -> Called;
        #[rustfmt::skip]
        let lasts: [Last; 5] = [
            |_| Called { op: "nothing", line: 0, result: Ok(()) },
            |dev| call!("barrier", dev.barrier()),
            |dev| call!("all_reduce", dev.all_reduce(&mut dev.zeros::<f32>(3).unwrap(), Sum)),
            |dev| call!("send", dev.send(&dev.zeros::<f32>(3).unwrap(), 0)),
            |dev| call!("exchange", dev.group(&[1, 0]).and_then(|all| all.exchange(7))),
        ];
        for (number, last) in lasts.into_iter().enumerate() {
            for receives in [false, true] {
                let (mut all, scope) = told(&pool, |dev| {
                    let called = last(dev);
                    assert!(called.result.is_ok());
                    if dev.rank() == 1 {
                        return Ok(called);
                    }
                    let mut x = dev.zeros::<f32>(3)?;
                    if number == 3 {
                        dev.recv(&mut x, 1)?;
                    }
                    Ok(match receives {
                        false => call!("reduce", dev.reduce(&mut x, Sum, 0)),
                        true => call!("recv", dev.recv(&mut x, 1)),
                    })
                });
                if number == 0 {
                    all[1].line = scope;
                }
                let error = all[0].result.clone().unwrap_err();
                assert!(error.to_string().contains("ended"), "{error}");
                assert_names_both("participation", &all, 1, &error);
            }
        }
        assert_works(&pool);
    }

    // The sender has gone on; it learns it with its next call.
    2: fn what_was_sent_and_what_is_received(gpus) {
        let pool = rig::pool(gpus, 2);
        for what in ["count", "dtype"] {
            let (all, _) = told(&pool, |dev| {
                if dev.rank() == 1 {
                    let sent = call!("send", dev.send(&dev.zeros::<f32>(3)?, 0));
                    sent.result?;
                    return Ok(Called { result: dev.barrier(), ..sent_at(sent.line) });
                }
                Ok(match what {
                    "count" => call!("recv", dev.recv(&mut dev.zeros::<f32>(4)?, 1)),
                    _ => call!("recv", dev.recv(&mut dev.zeros::<u32>(3)?, 1)),
                })
            });
            for called in &all {
                assert_names_both(what, &all, 1, called.result.as_ref().unwrap_err());
            }
        }
        assert_works(&pool);
    }
}

fn sent_at(line: u32) -> Called {
    Called { op: "send", line, result: Ok(()) }
}
