//! Transposes, and parts of matrices.

use crate::{on_both, support::Gpus};
use gpu_pool::DeviceCopy;
use gpu_pool_train::prelude::*;

fn transposes<T: DeviceCopy + PartialEq + std::fmt::Debug>(gpus: Gpus, of: fn(usize) -> T) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols) in [(0, 5), (5, 0), (1, 1), (1, 40), (40, 1), (32, 32), (33, 31), (100, 7), (65, 130)] {
            let a: Vec<T> = (0..rows * cols).map(of).collect();
            let x = dev.upload(&a)?;
            let y = dev.transpose(&x, rows, cols)?;
            let want: Vec<T> = (0..rows * cols).map(|i| a[i % rows * cols + i / rows]).collect();
            assert_eq!(dev.download(&y)?, want, "{rows} x {cols}");
            let mut z = dev.zeros::<T>(rows * cols)?;
            dev.transpose_into(&y, cols, rows, &mut z)?;
            assert_eq!(dev.download(&z)?, a);

            for count in [0, 1, 3] {
                let all: Vec<T> = (0..count * rows * cols).map(of).collect();
                let batch = dev.download(&dev.transpose_batch(&dev.upload(&all)?, count, rows, cols)?)?;
                let size = (rows * cols).max(1);
                let each = all.chunks_exact(size).flat_map(|x| (0..rows * cols).map(|i| x[i % rows * cols + i / rows]));
                assert_eq!(batch, each.collect::<Vec<_>>(), "{count} of {rows} x {cols}");
            }
        }
        Ok(())
    })
    .unwrap();
}

fn parts<T: DeviceCopy + PartialEq + std::fmt::Debug>(gpus: Gpus, of: fn(usize) -> T) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        for (rows, cols, from, to, begin, end) in
            [(0, 0, 0, 0, 0, 0), (1, 5, 5, 5, 3, 0), (4, 3, 7, 5, 2, 1), (9, 16, 32, 64, 16, 32), (3, 1, 1, 9, 0, 8)]
        {
            let n = 10 * 64;
            let (a, b): (Vec<T>, Vec<T>) = ((0..n).map(of).collect(), (n..2 * n).map(of).collect());
            let (src, mut dst) = (dev.upload(&a)?, dev.upload(&b)?);
            dev.copy_2d(&src.slice(begin..), from, &mut dst.slice_mut(end..), to, rows, cols)?;
            let mut want = b;
            for row in 0..rows {
                want[end + row * to..][..cols].copy_from_slice(&a[begin + row * from..][..cols]);
            }
            assert_eq!(dev.download(&dst)?, want, "{rows} x {cols}");
        }
        let (src, mut dst) = (dev.upload(&[of(0); 4])?, dev.upload(&[of(1); 4])?);
        for (rows, cols) in [(0, usize::MAX), (usize::MAX, 0), (0, 0)] {
            let pitch = if rows > 0 { 0 } else { usize::MAX };
            dev.copy_2d(&src, pitch, &mut dst, pitch, rows, cols)?;
        }
        assert!(dev.copy_2d(&src, usize::MAX, &mut dst, usize::MAX, usize::MAX, 0).is_err());
        assert_eq!(dev.download(&dst)?, [of(1); 4]);
        Ok(())
    })
    .unwrap();
}

/// Elements without bytes: any number of them is moved at once.
fn nothing(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        let all = usize::MAX;
        let (src, mut dst) = (dev.zeros::<()>(all)?, dev.zeros::<()>(all)?);
        for (rows, cols, pitch) in [(all, 1, 1), (1, all, all), (1 << 40, 3, 1 << 20)] {
            dev.copy_2d(&src, pitch, &mut dst, pitch, rows, cols)?;
        }
        assert!(dev.copy_2d(&src, 2, &mut dst, 1, all, 1).is_err());
        dev.copy(&src, &mut dst)?;
        let empty = dev.zeros::<u64>(0)?;
        assert_eq!(dev.transpose_batch(&empty, all, all, 0)?.len(), 0);
        assert_eq!(dev.download(&dev.upload(&[(); 5])?)?, [(); 5]);
        Ok(())
    })
    .unwrap();
}

on_both! {
    1: fn elements_without_bytes(gpus) { nothing(gpus) }
    1: fn transpose(gpus) {
        transposes::<u8>(gpus, |i| i as u8);
        transposes::<half::bf16>(gpus, |i| half::bf16::from_bits(i as u16 % 0x7f00));
        transposes::<f32>(gpus, |i| i as f32);
        transposes::<u64>(gpus, |i| i as u64 * 0x1_0000_0001);
    }
    1: fn copies_of_parts(gpus) {
        parts::<u8>(gpus, |i| i as u8);
        parts::<u16>(gpus, |i| i as u16);
        parts::<f32>(gpus, |i| i as f32);
        parts::<[u32; 3]>(gpus, |i| [i as u32; 3]);
    }
}
