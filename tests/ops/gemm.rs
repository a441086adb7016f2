//! Matrix products against a plain loop in `f64`: all types, transposes, parts of matrices, batches.

use crate::{
    each_type, on_both,
    rig::{Type, acc_eps, check, close, download, upload, values},
};
use gpu_pool::{Device, Error, GpuPool, Matrix, MatrixMut, ReduceOp, Result, kernel::GemmOutput};
use std::{thread, time::Duration};

/// `op(X)` of a row-major matrix of `lead` columns: element (r, c).
#[derive(Clone, Copy)]
struct Plain<'a> {
    x: &'a [f64],
    lead: usize,
    transposed: bool,
}

impl Plain<'_> {
    fn at(&self, r: usize, c: usize) -> f64 {
        self.x[if self.transposed { c * self.lead + r } else { r * self.lead + c }]
    }
}

/// Elements in `f64`; the sum of the absolute values of the terms of each; and the size of its product, if that is
/// added to an old value.
type Expected = (Vec<f64>, Vec<f64>, Vec<f64>);

/// `alpha * a * b + beta * c`.
fn product(
    (m, n, k): (usize, usize, usize),
    (alpha, beta): (f64, f64),
    (a, b): (Plain<'_>, Plain<'_>),
    c: Plain<'_>,
) -> Expected {
    let (mut sums, mut sizes, mut products) = Expected::default();
    for i in 0..m * n {
        let (r, col) = (i / n, i % n);
        let old = if beta == 0.0 { 0.0 } else { beta * c.at(r, col) };
        let (sum, size) = (0..k).fold((old, old.abs()), |(sum, size), j| {
            let term = alpha * a.at(r, j) * b.at(j, col);
            (sum + term, size + term.abs())
        });
        sums.push(sum);
        sizes.push(size);
        products.push(if beta == 0.0 { 0.0 } else { (sum - old).abs() });
    }
    (sums, sizes, products)
}

/// The bound that `Device::gemm` states.
#[track_caller]
fn near<T: Type>(got: &[f64], (want, sizes, products): &Expected, k: usize) {
    // cuBLAS may round the product to a half type before it adds the old value. Seen on an H200: 8 x 64 x 33 of f16.
    let round = if size_of::<T>() == 2 { T::EPS } else { 0.0 };
    close::<T>(got, want, |i| (k + 3) as f64 * acc_eps::<T>() * sizes[i] + round * products[i]);
}

const SIZES: [(usize, usize, usize); 5] = [(1, 1, 1), (3, 5, 7), (17, 1, 40), (8, 64, 33), (40, 70, 129)];

fn dense<T: Type>(pool: &GpuPool) {
    pool.run(|dev, _| {
        for (i, (m, n, k)) in SIZES.into_iter().enumerate() {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                for (alpha, beta) in [(1.0, 0.0), (0.5, 1.0), (-2.0, 3.0)] {
                    let seed = i as u64;
                    let (a, b) = (values::<T>(m * k, seed), values::<T>(k * n, seed + 10));
                    // With beta == 0 the old values must not be read: NaN would show.
                    let c = if beta == 0.0 { vec![f64::NAN; m * n] } else { values::<T>(m * n, seed + 20) };
                    let (da, db, mut dc) = (upload::<T>(dev, &a)?, upload::<T>(dev, &b)?, upload::<T>(dev, &c)?);
                    let x = if ta { Matrix::new(&da, k, m)?.t() } else { Matrix::new(&da, m, k)? };
                    let y = if tb { Matrix::new(&db, n, k)?.t() } else { Matrix::new(&db, k, n)? };
                    dev.gemm(T::acc(alpha), x, y, T::acc(beta), &mut dc)?;
                    let pa = Plain { x: &a, lead: if ta { m } else { k }, transposed: ta };
                    let pb = Plain { x: &b, lead: if tb { k } else { n }, transposed: tb };
                    let pc = Plain { x: &c, lead: n, transposed: false };
                    near::<T>(&download(dev, &dc)?, &product((m, n, k), (alpha, beta), (pa, pb), pc), k);
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Rows from 2 and columns from 3 of `x`, or the transpose of such a part.
fn part_of<T: Type>(x: Matrix<'_, T>, rows: usize, cols: usize, transposed: bool) -> Result<Matrix<'_, T>> {
    let part = match transposed {
        false => x.rows(2..2 + rows)?.columns(3..3 + cols)?,
        // Parts of the transpose are transposes of parts.
        true => x.t().rows(3..3 + rows)?.columns(2..2 + cols)?,
    };
    assert_eq!(part.shape(), (rows, cols));
    Ok(part)
}

/// Columns of wide matrices, also transposed, into columns of a wide matrix.
fn parts<T: Type>(pool: &GpuPool) {
    pool.run(|dev, _| {
        let (m, n, k) = (5, 6, 9);
        for (ta, tb) in [(false, false), (true, true)] {
            let (wa, wb, wc) = (20, 13, 11);
            let (a, b, c) = (values::<T>(12 * wa, 1), values::<T>(12 * wb, 2), values::<T>(8 * wc, 3));
            let (da, db, mut dc) = (upload::<T>(dev, &a)?, upload::<T>(dev, &b)?, upload::<T>(dev, &c)?);
            let x = part_of(Matrix::new(&da, 12, wa)?, m, k, ta)?;
            let y = part_of(Matrix::new(&db, 12, wb)?, k, n, tb)?;
            dev.gemm(
                T::acc(1.5),
                x,
                y,
                T::acc(-1.0),
                &mut MatrixMut::new(&mut dc, 8, wc)?.rows(1..=5)?.columns(4..10)?,
            )?;
            let pa = Plain { x: &a[2 * wa + 3..], lead: wa, transposed: ta };
            let pb = Plain { x: &b[2 * wb + 3..], lead: wb, transposed: tb };
            let pc = Plain { x: &c[wc + 4..], lead: wc, transposed: false };
            let got = download(dev, &dc)?;
            let inside: Vec<f64> = (0..m * n).map(|i| got[(1 + i / n) * wc + 4 + i % n]).collect();
            near::<T>(&inside, &product((m, n, k), (1.5, -1.0), (pa, pb), pc), k);
            for (i, (got, old)) in got.iter().zip(&c).enumerate() {
                let is_in = (1..6).contains(&(i / wc)) && (4..10).contains(&(i % wc));
                assert!(is_in || got == old, "element {i} is no part of the result");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Heads of attention (interleaved columns), blocks of rows, one matrix for all, and any stride.
fn batches<T: Type>(pool: &GpuPool) {
    pool.run(|dev, _| {
        let (heads, tokens, width) = (3, 7, 4);
        let all = heads * width;
        let (q, k, v) = (values::<T>(tokens * all, 1), values::<T>(tokens * all, 2), values::<T>(tokens * all, 3));
        let (dq, dk, dv) = (upload::<T>(dev, &q)?, upload::<T>(dev, &k)?, upload::<T>(dev, &v)?);
        let split = |x| Matrix::new(x, tokens, all)?.split_columns(heads);
        let mut scores = dev.zeros::<T>(heads * tokens * tokens)?;
        dev.gemm(T::acc(0.5), split(&dq)?, split(&dk)?.t(), T::acc(0.0), &mut scores)?;
        let s = download(dev, &scores)?;
        // Half of each product is exact.
        let whole = download(dev, &dev.matmul(split(&dq)?, split(&dk)?.t())?)?;
        let halves = whole.iter().map(|x| x / 2.0).collect();
        near::<T>(&s, &(halves, vec![0.0; s.len()], vec![0.0; s.len()]), 0);
        let mut out = dev.zeros::<T>(tokens * all)?;
        let blocks = Matrix::new(&scores, heads * tokens, tokens)?.split_rows(heads)?;
        assert_eq!((blocks.count(), blocks.shape()), (heads, (tokens, tokens)));
        let to = &mut MatrixMut::new(&mut out, tokens, all)?.split_columns(heads)?;
        dev.gemm(T::acc(1.0), blocks, split(&dv)?, T::acc(0.0), to)?;
        let o = download(dev, &out)?;
        let nothing = Plain { x: &[], lead: 1, transposed: false };
        for head in 0..heads {
            let [pq, pk, pv] = [(&q, false), (&k, true), (&v, false)].map(|(x, transposed)| Plain {
                x: &x[head * width..],
                lead: all,
                transposed,
            });
            let want = product((tokens, tokens, width), (0.5, 0.0), (pq, pk), nothing);
            let own = &s[head * tokens * tokens..][..tokens * tokens];
            near::<T>(own, &want, width);
            let ps = Plain { x: own, lead: tokens, transposed: false };
            let want = product((tokens, width, tokens), (1.0, 0.0), (ps, pv), nothing);
            let got: Vec<f64> = (0..tokens * width).map(|i| o[i / width * all + head * width + i % width]).collect();
            near::<T>(&got, &want, tokens);
        }

        // One matrix for all, and windows that overlap, 2 elements apart.
        let windows = Matrix::strided(&dq, 2, 5, 6)?.batch(4, 2)?;
        let one = Matrix::strided(&dk, 5, 3, 3)?;
        let mut y = upload::<T>(dev, &values::<T>(4 * 10, 4))?;
        let old = download(dev, &y)?;
        // Results 10 apart, of 2 x 3 with a leading dimension of 5.
        dev.gemm(T::acc(1.0), windows, one, T::acc(1.0), &mut MatrixMut::strided(&mut y, 2, 3, 5)?.batch(4, 10)?)?;
        let y = download(dev, &y)?;
        for i in 0..4 {
            let (pw, po) =
                (Plain { x: &q[2 * i..], lead: 6, transposed: false }, Plain { x: &k, lead: 3, transposed: false });
            let pc = Plain { x: &old[10 * i..], lead: 5, transposed: false };
            let got: Vec<f64> = (0..6).map(|j| y[10 * i + j / 3 * 5 + j % 3]).collect();
            near::<T>(&got, &product((2, 3, 5), (1.0, 1.0), (pw, po), pc), 5);
            assert_eq!(y[10 * i + 8..10 * i + 10], old[10 * i + 8..10 * i + 10]);
        }
        Ok(())
    })
    .unwrap();
}

/// No `k`: the product is zero, and what lies between the rows stays.
fn empty<T: Type>(pool: &GpuPool) {
    pool.run(|dev, _| {
        let none = dev.zeros::<T>(0)?;
        let (rows, cols) = (Matrix::new(&none, 2, 0)?, Matrix::new(&none, 0, 3)?);
        let mut c = upload::<T>(dev, &[1.0; 8])?;
        dev.gemm(T::acc(1.0), rows, cols, T::acc(2.0), &mut MatrixMut::new(&mut c, 2, 4)?.columns(..3)?)?;
        assert_eq!(download(dev, &c)?, [2.0, 2.0, 2.0, 1.0, 2.0, 2.0, 2.0, 1.0]);
        dev.gemm(T::acc(1.0), rows, cols, T::acc(0.0), &mut MatrixMut::new(&mut c, 2, 4)?.columns(1..)?)?;
        assert_eq!(download(dev, &c)?, [2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]);
        dev.gemm(T::acc(1.0), cols.t(), rows.t(), T::acc(0.0), &mut dev.zeros::<T>(6)?)?;
        dev.gemm(T::acc(1.0), Matrix::new(&c, 8, 1)?, Matrix::new(&none, 1, 0)?, T::acc(0.0), &mut dev.zeros::<T>(0)?)
    })
    .unwrap();
}

fn in_a_graph<T: Type>(pool: &GpuPool) {
    pool.run(|dev, _| {
        let x = upload::<T>(dev, &values::<T>(4 * 6, 1))?;
        let step = |dev: &Device| -> Result<_> {
            let mut y = dev.zeros::<T>(2 * 4 * 4)?;
            let x = Matrix::new(&x, 4, 6)?.split_columns(2)?;
            dev.gemm(T::acc(1.0), x, x.t(), T::acc(0.0), &mut y)?;
            Ok(y)
        };
        // cuBLAS is loaded by the first product, which a graph cannot hold.
        let direct = step(dev)?;
        let (graph, captured) = dev.capture(step)?;
        dev.launch_graph(&graph)?;
        dev.launch_graph(&graph)?;
        assert_eq!(download(dev, &captured)?, download(dev, &direct)?);
        Ok(())
    })
    .unwrap();
}

#[track_caller]
fn refused<R>(result: Result<R>, op: &str, shapes: &str) {
    let Err(error) = result else { panic!("{op} took it") };
    let text = error.to_string();
    assert!(matches!(&error, Error::InvalidArgument { op: named, .. } if *named == op), "{text}");
    for part in ["device 0", "gemm.rs", shapes] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// One member is late by turns. The others sleep in the meeting then, so it comes to its product before they launch.
fn beside_collectives<T: Type>(pool: &GpuPool, sizes: &[usize]) {
    pool.run(|dev, _| {
        let side = dev.stream()?;
        let mut largest = dev.upload(&[1.0f32; 1000])?;
        let (mut round, mut kept) = (0, Vec::new());
        for &size in sizes {
            let x = upload::<T>(dev, &values::<T>(size * size, 7))?;
            let square = Matrix::new(&x, size, size)?;
            for (a, b) in [(square, square), (square.t(), square), (square, square.t()), (square.t(), square.t())] {
                if dev.rank() == round % dev.count() {
                    thread::sleep(Duration::from_millis(5));
                }
                dev.all_reduce(&mut largest, ReduceOp::Max)?;
                kept.push(dev.on(&side).matmul(a, b)?);
                round += 1;
            }
        }
        assert!(dev.download(&largest)?.iter().all(|x| *x == 1.0));
        Ok(())
    })
    .unwrap();
}

fn multiply<C: GemmOutput<Elem = f32>>(dev: &Device, a: Matrix<'_>, b: Matrix<'_>, c: &mut C) -> Result<()> {
    dev.gemm(1.0, a, b, 0.0, c)
}

on_both! {
    1: fn dense_products(gpus) {
        let pool = gpus.pool(1);
        each_type!(dense(&pool));
    }

    1: fn products_of_parts(gpus) {
        let pool = gpus.pool(1);
        each_type!(parts(&pool));
    }

    1: fn products_of_batches(gpus) {
        let pool = gpus.pool(1);
        each_type!(batches(&pool));
    }

    1: fn products_without_terms(gpus) {
        let pool = gpus.pool(1);
        each_type!(empty(&pool));
    }

    1: fn products_in_graphs(gpus) {
        let pool = gpus.pool(1);
        each_type!(in_a_graph(&pool));
    }

    // openxla/xla#38932, torchcomms#2334: the first product of a kind loads a kernel. That waits for the kernels that
    // run, holds up other threads' launches meanwhile, and those that run may wait for these. (It cannot hang where
    // devices share a GPU: there they submit nothing between their launches.)
    2: fn first_products_beside_collectives(gpus) {
        let pool = gpus.unwatched(gpus.up_to(3)).timeout(Duration::from_secs(20)).build().unwrap();
        let sizes: &[usize] = if gpus.is_cuda() { &[16, 40, 96, 200, 512] } else { &[16] };
        each_type!(beside_collectives(&pool, sizes));
    }

    // Factors of 10 bits are exact in TF32; others are off by 2^-10 each at most.
    1: fn tf32_products(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (m, n, k) = (64, 48, 100);
            for (exact, slack) in [(true, 0.0), (false, 2f64.powi(-9))] {
                let round = |x: f64| if exact { (x * 128.0).round() / 128.0 } else { x };
                let all = |n, seed| values::<f32>(n, seed).into_iter().map(round).collect::<Vec<_>>();
                let (a, b) = (all(m * k, 5), all(k * n, 6));
                let (da, db, mut dc) = (upload::<f32>(dev, &a)?, upload::<f32>(dev, &b)?, dev.zeros::<f32>(m * n)?);
                dev.gemm_tf32(1.0, Matrix::new(&da, m, k)?, Matrix::new(&db, k, n)?, 0.0, &mut dc)?;
                let plain = |x, lead| Plain { x, lead, transposed: false };
                let none = plain(&[], 1);
                let (want, sizes, _) = product((m, n, k), (1.0, 0.0), (plain(&a, k), plain(&b, n)), none);
                let bound = slack + (k + 3) as f64 * acc_eps::<f32>();
                close::<f32>(&download(dev, &dc)?, &want, |i| bound * sizes[i]);
            }
            Ok(())
        })
        .unwrap();
    }

    1: fn steps_back(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            // `a` is 3 x 5, `b` is 5 x 2; the steps back are products, too.
            let (a, b, w) = (values::<f64>(15, 13), values::<f64>(10, 14), values::<f64>(6, 15));
            let (on_a, on_b, dy) = (dev.upload(&a)?, dev.upload(&b)?, dev.upload(&w)?);
            let product = |x: Matrix<'_, f64>, y: Matrix<'_, f64>| {
                let mut z = dev.zeros::<f64>(x.shape().0 * y.shape().1)?;
                dev.gemm(1.0, x, y, 0.0, &mut z)?;
                Ok::<_, gpu_pool::Error>(z)
            };
            let (x, y, dz) = (Matrix::new(&on_a, 3, 5)?, Matrix::new(&on_b, 5, 2)?, Matrix::new(&dy, 3, 2)?);
            check(dev, &a, &w, &product(dz, y.t())?, |a| product(Matrix::new(a, 3, 5)?, y))?;
            check(dev, &b, &w, &product(x.t(), dz)?, |b| product(x, Matrix::new(b, 5, 2)?))
        })
        .unwrap();
    }

    1: fn wrong_shapes(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, mut y) = (dev.zeros::<f32>(12)?, dev.zeros::<f32>(12)?);
            let a = Matrix::new(&x, 3, 4)?;
            refused(Matrix::new(&x, 3, 5), "Matrix::new", "3 x 5 of 12 elements");
            refused(dev.matmul(Matrix::new(&x, 3, 4)?, Matrix::new(&x, 3, 4)?), "matmul", "(3 x 4) * (3 x 4)");
            refused(Matrix::new(&x, usize::MAX, 2), "Matrix::new", "of 12 elements");
            refused(MatrixMut::new(&mut y, 2, 5), "MatrixMut::new", "2 x 5 of 12 elements");
            refused(Matrix::strided(&x, 3, 4, 3), "Matrix::strided", "rows of 4 elements at a leading dimension of 3");
            let why = "3 x 4 with a leading dimension of 5 in a view of 12 elements";
            refused(Matrix::strided(&x, 3, 4, 5), "Matrix::strided", why);
            refused(Matrix::strided(&x, 3, 4, usize::MAX), "Matrix::strided", "in a view of 12 elements");
            refused(a.columns(2..5), "Matrix::columns", "columns 2..5 of 3 x 4");
            refused(a.t().columns(2..5), "Matrix::columns", "columns 2..5 of 4 x 3");
            #[allow(clippy::reversed_empty_ranges)]
            {
                refused(a.rows(2..1), "Matrix::rows", "rows 2..1 of 3 x 4");
            }
            refused(a.rows(..=usize::MAX), "Matrix::rows", "of 3 x 4");
            refused(a.split_rows(2), "Matrix::split_rows", "2 equal parts of the rows of 3 x 4");
            refused(a.split_columns(0), "Matrix::split_columns", "0 equal parts of the columns of 3 x 4");
            refused(a.split_rows(3)?.split_columns(3), "Matrix::split_columns", "of the columns of 3 of 1 x 4");
            refused(a.batch(2, 1), "Matrix::batch", "2 of 3 x 4 with a stride of 1 in a view of 12 elements");
            let two = MatrixMut::strided(&mut y, 2, 2, 6)?;
            refused(two.batch(3, 1), "MatrixMut::batch", "overlap");
            refused(MatrixMut::strided(&mut y, 2, 2, 6)?.batch(2, 0), "MatrixMut::batch", "overlap");
            assert_eq!(MatrixMut::strided(&mut y, 2, 2, 6)?.batch(3, 2)?.count(), 3);
            assert_eq!(MatrixMut::strided(&mut y, 2, 2, 6)?.batch(0, 0)?.count(), 0);

            // A distance that leads to no element may be any number.
            let huge = usize::MAX;
            let none = Matrix::strided(&x, 2, 0, huge)?.batch(3, huge / 2)?;
            dev.gemm(1.0, none, Matrix::strided(&x, 0, 2, huge)?, 1.0, &mut y)?;
            let row = Matrix::strided(&x, 1, 4, huge)?;
            assert_eq!(row.rows(1..)?.columns(1..)?.shape(), (0, 3));
            assert_eq!(row.t().columns(1..)?.rows(1..)?.split_rows(3)?.shape(), (1, 0));
            assert_eq!(row.batch(huge, 0)?.rows(..0)?.count(), huge);
            assert_eq!(a.rows(3..)?.columns(4..)?.batch(huge, huge)?.shape(), (0, 0));
            dev.gemm(1.0, row, row.t(), 0.0, &mut y.slice_mut(..1))?;

            refused(multiply(dev, a, a, &mut y), "gemm", "(3 x 4) * (3 x 4) into 12 elements");
            refused(multiply(dev, a, a.t(), &mut y), "gemm", "(3 x 4) * (4 x 3) into 12 elements");
            let mut to = MatrixMut::new(&mut y, 4, 3)?;
            refused(multiply(dev, a, a.t(), &mut to), "gemm", "(3 x 4) * (4 x 3) into (4 x 3)");
            let parts = a.split_columns(2)?;
            let why = "(2 of 3 x 2 with a leading dimension of 4 with a stride of 2) * (3 of 4 x 1";
            refused(multiply(dev, parts, a.t().split_columns(3)?, &mut y), "gemm", why);
            refused(dev.gemm_tf32(1.0, a, a, 0.0, &mut y), "gemm_tf32", "(3 x 4) * (3 x 4)");
            assert_eq!(dev.download(&y)?, [0.0; 12]);
            Ok(())
        })
        .unwrap();
    }
}
