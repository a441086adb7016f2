//! scratch
use gpu_pool::{Algorithm, Check, Device, DeviceBuffer, Error, GpuPool, ReduceOp};
use std::time::Instant;
fn pool(a: Algorithm) -> GpuPool {
    GpuPool::builder().cuda().devices(&[0, 1]).algorithm(a).check(Check::Off).record_memory(false).build().unwrap()
}
fn op(dev: &Device, op: &str, x: &mut DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>, n: usize) -> Result<(), Error> {
    match op {
        "all_reduce" => dev.all_reduce(&mut x.slice_mut(..n), ReduceOp::Avg),
        "all_gather" => dev.all_gather(&x.slice(..n / 2), &mut y.slice_mut(..n)),
        "broadcast" => dev.broadcast(&mut x.slice_mut(..n), 0),
        "all_to_all" => dev.all_to_all(&x.slice(..n), &mut y.slice_mut(..n)),
        "reduce_scatter" => dev.reduce_scatter(&x.slice(..n), &mut y.slice_mut(..n / 2), ReduceOp::Avg),
        _ => unreachable!(),
    }
}
fn set(config: &str) {
    for kv in config.split(',').filter(|s| s.contains('=')) {
        let (k, v) = kv.split_once('=').unwrap();
        unsafe { std::env::set_var(k, v) }
    }
}
fn unset(config: &str) {
    for kv in config.split(',').filter(|s| s.contains('=')) {
        let (k, _) = kv.split_once('=').unwrap();
        unsafe { std::env::remove_var(k) }
    }
}
fn main() {
    let direct = pool(Algorithm::Direct);
    let copies = pool(Algorithm::Copies);
    let ring = pool(Algorithm::Ring);
    let most = (1usize << 30) / 4;
    let bufs = |p: &GpuPool| {
        p.run(|dev, _| {
            let block: Vec<f32> = (0..1 << 20).map(|i| (i as f32 * 0.37 + dev.rank() as f32).sin()).collect();
            let mut x = dev.zeros::<f32>(most)?;
            for k in 0..most >> 20 {
                dev.upload_into(&block, &mut x.slice_mut(k << 20..(k + 1) << 20))?;
            }
            Ok((x, dev.zeros::<f32>(most)?))
        })
        .unwrap()
    };
    let held = parking_lot::Mutex::new(bufs(&direct).into_iter().map(Some).collect::<Vec<_>>());
    drop(held);
    let args: Vec<String> = std::env::args().skip(1).collect();
    let configs: Vec<&str> = args.iter().map(|s| s.as_str()).collect();
    for name in ["all_reduce", "all_gather", "broadcast", "all_to_all", "reduce_scatter"] {
        for mb in [2usize, 4, 8, 16, 32, 64, 128, 256, 512, 1024] {
            let n = (mb << 20) / 4;
            let calls = (4000 / mb).clamp(4, 200);
            let mut times = vec![Vec::new(); configs.len()];
            // each pool allocates its own buffers for this size
            for _turn in 0..5 {
                for (k, config) in configs.iter().enumerate() {
                    let p = if config.starts_with("copies") {
                        &copies
                    } else if config.starts_with("ring") {
                        &ring
                    } else {
                        &direct
                    };
                    if config.starts_with("ring") && name != "all_reduce" {
                        times[k].push(f64::NAN);
                        continue;
                    }
                    set(config);
                    let t = p
                        .run(|dev, _| {
                            let mut x = dev.zeros::<f32>(n)?;
                            let mut y = dev.zeros::<f32>(n)?;
                            dev.fill(&mut x, 0.7)?;
                            for _ in 0..2 {
                                op(dev, name, &mut x, &mut y, n)?;
                            }
                            dev.synchronize()?;
                            dev.barrier()?;
                            let c = Instant::now();
                            for _ in 0..calls {
                                op(dev, name, &mut x, &mut y, n)?;
                            }
                            dev.synchronize()?;
                            Ok(c.elapsed().as_secs_f64() * 1e6 / calls as f64)
                        })
                        .unwrap();
                    unset(config);
                    times[k].push(t.into_iter().fold(0.0, f64::max));
                }
            }
            print!("{name:14} {mb:5} MB ");
            for t in &mut times {
                t.sort_by(f64::total_cmp);
                print!(" {:9.1}", t[t.len() / 2]);
            }
            println!();
        }
    }
    // beside GEMM: 64 MB
    for mb in [16usize, 64, 256] {
        for config in &configs {
            let p = if config.starts_with("copies") {
                &copies
            } else if config.starts_with("ring") {
                &ring
            } else {
                &direct
            };
            set(config);
            let n = (mb << 20) / 4;
            let side = 4096;
            let f = p.run(|dev, _| {
                let (a, mut c) = (
                    dev.upload(&(0..side * side).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<_>>())?,
                    dev.zeros::<f32>(side * side)?,
                );
                let stream = dev.stream()?;
                let comm = dev.on(&stream);
                let mut x = comm.zeros::<f32>(n)?;
                let mut out = Vec::new();
                for calls in [0usize, 1] {
                    for _rep in 0..5 {
                        dev.gemm(
                            1.0,
                            gpu_pool::Matrix::new(&a, side, side)?,
                            gpu_pool::Matrix::new(&a, side, side)?,
                            0.0,
                            &mut c,
                        )?;
                        dev.synchronize()?;
                        comm.synchronize()?;
                        dev.barrier()?;
                        let s = dev.record_timed()?;
                        for _ in 0..20 {
                            dev.gemm(
                                1.0,
                                gpu_pool::Matrix::new(&a, side, side)?,
                                gpu_pool::Matrix::new(&a, side, side)?,
                                0.0,
                                &mut c,
                            )?;
                        }
                        let e = dev.record_timed()?;
                        let w = Instant::now();
                        if calls > 0 {
                            for _ in 0..(120000 * 3 / (mb * 1000)).max(8) {
                                comm.all_reduce(&mut x, ReduceOp::Avg)?;
                            }
                        }
                        comm.synchronize()?;
                        let wall = w.elapsed().as_secs_f64() * 1e6;
                        dev.synchronize()?;
                        let t = e.elapsed_since(&s)?.as_secs_f64() * 1e6;
                        out.push((t, wall));
                    }
                }
                let med = |v: &[(f64, f64)]| {
                    let mut v: Vec<f64> = v.iter().map(|x| x.0).collect();
                    v.sort_by(f64::total_cmp);
                    v[v.len() / 2]
                };
                Ok((med(&out[..5]), med(&out[5..]), out[9].1))
            });
            unset(config);
            match f {
                Ok(f) => println!(
                    "beside gemm {mb} MB {config:40} alone {:8.0} beside {:8.0} ratio {:.3}; collectives took {:8.0}",
                    f[0].0,
                    f[0].1,
                    f[0].1 / f[0].0,
                    f[0].2
                ),
                Err(e) => println!("beside {config}: {e}"),
            }
        }
    }
}
