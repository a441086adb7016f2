//! Products of batches with up to three dimensions against a plain loop that computes each index by itself. All values
//! are small whole numbers, so results are exact.

use crate::on_both;
use gpu_pool::{DeviceBuffer, Matrix, MatrixMut, Result};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

/// How the matrices of a batch lie in a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// Heads of texts: blocks of rows, each split into columns; a distance between the outermost.
    Heads,
    /// One matrix below the other.
    Blocks,
    /// Blocks by the innermost dimension alone.
    Innermost,
    /// Blocks by the middle dimension; the innermost is one.
    Middle,
    /// Windows that overlap.
    Windows,
    /// One matrix.
    One,
}
use Form::{Blocks, Heads, Innermost, Middle, One, Windows};

/// Numbers of matrices, rows and columns, as they are stored.
#[derive(Clone, Copy, Debug)]
struct Stored {
    form: Form,
    counts: [usize; 3],
    rows: usize,
    cols: usize,
}

impl Stored {
    /// The numbers of matrices that are there.
    fn own(&self) -> [usize; 3] {
        let [_, middle, inner] = self.counts;
        match self.form {
            Innermost => [1, 1, inner],
            Middle => [1, middle, 1],
            One => [1; 3],
            Heads | Blocks | Windows => self.counts,
        }
    }

    /// Elements from one outermost block of heads to the next.
    fn apart(&self) -> usize {
        self.counts[1] * self.rows * (self.counts[2] * self.cols + 1) + 3
    }

    fn at(&self, batch: [usize; 3], r: usize, c: usize) -> usize {
        let own = self.own();
        let [p, b, h] = [0, 1, 2].map(|d| batch[d] % own[d]);
        let (rows, cols) = (self.rows, self.cols);
        match self.form {
            Heads => p * self.apart() + (b * rows + r) * (own[2] * cols + 1) + h * cols + c,
            Windows => 3 * p + 2 * b + h + r * cols + c,
            _ => (((p * own[1] + b) * own[2] + h) * rows + r) * cols + c,
        }
    }

    fn len(&self) -> usize {
        let [p, b, h] = self.own();
        self.at([p - 1, b - 1, h - 1], self.rows - 1, self.cols - 1) + 1
    }
}

/// Both kinds of matrices are made by the same calls.
macro_rules! matrix {
    ($Matrix:ident, $x:expr, $s:expr) => {{
        let (s, [p, b, h]) = ($s, $s.counts);
        let blocks = |x, n| $Matrix::new(x, n * s.rows, s.cols);
        match s.form {
            Heads => $Matrix::strided($x, b * s.rows, h * s.cols, h * s.cols + 1)?
                .split_rows(b)?
                .split_columns(h)?
                .batch(p, s.apart())?,
            Blocks => blocks($x, p * b * h)?.split_rows(p)?.split_rows(b)?.split_rows(h)?,
            Innermost => blocks($x, h)?.split_rows(h)?,
            Middle => blocks($x, b)?.split_rows(b)?.split_rows(1)?,
            Windows => $Matrix::strided($x, s.rows, s.cols, s.cols)?.batch(h, 1)?.batch(b, 2)?.batch(p, 3)?,
            One => $Matrix::new($x, s.rows, s.cols)?,
        }
    }};
}

fn matrix(x: &DeviceBuffer<f32>, s: Stored, transposed: bool) -> Result<Matrix<'_>> {
    let x = matrix!(Matrix, x, s);
    Ok(if transposed { x.t() } else { x })
}

fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 5 + i / 7 + seed) % 7) as f32 - 3.0).collect()
}

on_both! {
    1: fn products_of_batches_of_batches(gpus) {
        let pool = gpus.pool(1);
        let form = || prop::sample::select(vec![Heads, Blocks, Innermost, Middle, Windows, One]);
        // The result fills a buffer, or lies in one as heads or blocks do.
        let to = prop::sample::select(vec![None, Some(Heads), Some(Blocks)]);
        let cases = (
            (form(), form(), to, any::<[bool; 2]>(), any::<bool>()),
            prop::array::uniform3(1..=3usize),
            prop::array::uniform3(1..=4usize),
        );
        let config = Config { cases: 300, failure_persistence: None, ..Config::default() };
        type Case = ((Form, Form, Option<Form>, [bool; 2], bool), [usize; 3], [usize; 3]);
        let test = |((x, y, to, [ta, tb], adds), counts, [m, n, k]): Case| {
            let stored = |form, rows, cols, t| match t {
                false => Stored { form, counts, rows, cols },
                true => Stored { form, counts, rows: cols, cols: rows },
            };
            let (x, y) = (stored(x, m, k, ta), stored(y, k, n, tb));
            let counts = [0, 1, 2].map(|d| x.own()[d].max(y.own()[d]));
            let z = Stored { form: to.unwrap_or(Blocks), counts, rows: m, cols: n };
            let (a, b, old) = (numbers(x.len(), 1), numbers(y.len(), 2), numbers(z.len(), 3));
            let mut want = old.clone();
            for i in 0..counts.iter().product() {
                let batch = [i / counts[2] / counts[1], i / counts[2] % counts[1], i % counts[2]];
                for (r, c) in (0..m * n).map(|j| (j / n, j % n)) {
                    let sum: f32 = (0..k)
                        .map(|j| {
                            let (left, right) = (if ta { (j, r) } else { (r, j) }, if tb { (c, j) } else { (j, c) });
                            a[x.at(batch, left.0, left.1)] * b[y.at(batch, right.0, right.1)]
                        })
                        .sum();
                    let at = z.at(batch, r, c);
                    want[at] = 2.0 * sum + if adds { old[at] } else { 0.0 };
                }
            }
            let got = pool.on_device(0).run(|dev| {
                let (da, db, mut dc) = (dev.upload(&a)?, dev.upload(&b)?, dev.upload(&old)?);
                let (left, right) = (matrix(&da, x, ta)?, matrix(&db, y, tb)?);
                assert_eq!((left.count(), left.shape()), (x.own().iter().product(), (m, k)));
                let beta = f32::from(u8::from(adds));
                match to {
                    None => dev.gemm(2.0, left, right, beta, &mut dc)?,
                    Some(_) => dev.gemm(2.0, left, right, beta, &mut matrix!(MatrixMut, &mut dc, z))?,
                }
                dev.download(&dc)
            });
            prop_assert_eq!(got.unwrap(), want);
            Ok(())
        };
        TestRunner::new(config).run(&cases, test).unwrap();
    }

    1: fn batches_that_do_not_fit(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, mut y) = (dev.zeros::<f32>(24)?, dev.zeros::<f32>(24)?);
            let a = Matrix::new(&x, 6, 4)?.split_rows(2)?.split_columns(2)?;
            assert_eq!((a.counts(), a.count(), a.shape()), (vec![2, 2], 4, (3, 2)));
            let told = |result: Result<()>, part: &str| {
                let text = result.unwrap_err().to_string();
                assert!(text.contains(part) && text.contains("batches.rs"), "{text}");
            };
            // The innermost dimensions meet: 2 and 3.
            let three = Matrix::new(&x, 6, 4)?.split_rows(3)?;
            let why = "(2 of 2 of 3 x 2 with a leading dimension of 4 with strides of 12 and 2) *";
            told(dev.matmul(a, three).map(drop), why);
            told(dev.matmul(a, three).map(drop), "* (3 of 2 x 4)");
            // As many matrices in one dimension are another shape.
            let flat = &mut MatrixMut::new(&mut y, 12, 2)?.rows(..4)?.split_rows(4)?;
            let one = Matrix::new(&x, 8, 3)?.rows(..2)?.columns(..2)?;
            told(dev.gemm(1.0, a.rows(..1)?, one, 0.0, flat), "into (4 of 1 x 2)");
            let deep = a.batch(1, 0)?;
            assert_eq!(deep.counts(), [1, 2, 2]);
            told(deep.batch(1, 0).map(drop), "has 3 dimensions of batches, the most");
            told(deep.split_rows(3).map(drop), "has 3 dimensions of batches, the most");
            // Two of the inner batches share an element.
            let heads = MatrixMut::new(&mut y, 6, 4)?.rows(..3)?.split_columns(2)?;
            told(heads.batch(2, 8).map(drop), "overlap");
            let heads = MatrixMut::new(&mut y, 6, 4)?.rows(..3)?.split_columns(2)?;
            assert_eq!(heads.batch(2, 12)?.count(), 4);
            Ok(())
        })
        .unwrap();
    }
}
