//! Rows of a table, and their gradient.

use crate::{
    each_type, on_both,
    rig::{Type, acc_eps, close, download, upload, values},
    support::Gpus,
};
use gpu_pool_train::prelude::*;

fn tables<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols, n) in [(1, 1, 0), (1, 1, 1), (3, 7, 10), (50, 16, 300), (10, 1100, 5), (1000, 3, 20)] {
            let (table, d) = (values::<T>(rows * cols, 1), values::<T>(n * cols, 2));
            // Row 0 is named often, the last one never.
            let named = |i: usize| if i.is_multiple_of(3) { 0 } else { (i * 31) % rows.saturating_sub(1).max(1) };
            let indices: Vec<usize> = (0..n).map(named).collect();
            let (t, dy) = (upload::<T>(dev, &table)?, upload::<T>(dev, &d)?);
            let on = dev.upload(&indices.iter().map(|&i| i as u32).collect::<Vec<_>>())?;
            let want: Vec<_> = indices.iter().flat_map(|&i| table[i * cols..][..cols].to_vec()).collect();
            assert_eq!(download(dev, &dev.embedding(&t, cols, &on)?)?, want);

            let mut sums = table.clone();
            for (i, &index) in indices.iter().enumerate() {
                (0..cols).for_each(|c| sums[index * cols + c] += d[i * cols + c]);
            }
            let (mut x, mut y) = (upload::<T>(dev, &table)?, upload::<T>(dev, &table)?);
            dev.embedding_backward(&dy, cols, &on, &mut x)?;
            dev.embedding_backward(&dy, cols, &on, &mut y)?;
            close::<T>(&download(dev, &x)?, &sums, |_| 3.0 * (n * n) as f64 * acc_eps::<T>());
            assert_eq!(dev.download(&x)?, dev.download(&y)?);
        }
        Ok(())
    })
    .unwrap();
}

on_both! {
    1: fn rows_of_tables(gpus) { each_type!(tables(gpus)) }

    1: fn indices_that_are_no_row(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let table = dev.upload(&[1.0f32, 2.0, 3.0, 4.0])?;
            let indices = dev.upload(&[1i32, 2, -1])?;
            let rows = dev.download(&dev.embedding(&table, 2, &indices)?)?;
            assert!(rows[..2] == [3.0, 4.0] && rows[2..].iter().all(|x| x.is_nan()));
            let mut dtable = dev.zeros::<f32>(4)?;
            dev.embedding_backward(&dev.upload(&[1.0f32; 6])?, 2, &indices, &mut dtable)?;
            assert_eq!(dev.download(&dtable)?, [0.0, 0.0, 1.0, 1.0]);
            Ok(())
        })
        .unwrap();
    }
}
