//! Random numbers and dropout.

use crate::{
    each_type, on_both,
    rig::{Type, download, upload},
    support::Gpus,
};
use gpu_pool::Error;
use gpu_pool_train::prelude::*;

fn distributions<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        let n = 20_000;
        let moments = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / n as f64;
            (mean, x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64)
        };
        let mut x = dev.zeros::<T>(n)?;
        dev.uniform(&mut x, T::acc(0.0)..T::acc(1.0), 11, 0)?;
        let u = download(dev, &x)?;
        assert!(u.iter().all(|u| (0.0..1.0).contains(u)));
        // Numbers of few bits are rounded down: by 2^-9 in the mean of bf16. 5 sigma of the mean are 0.0102.
        let (mean, variance) = moments(&u);
        assert!((mean - 0.5).abs() < 0.0102 + T::EPS && (variance - 1.0 / 12.0).abs() < 0.004, "{mean} {variance}");
        dev.normal(&mut x, T::acc(2.0), T::acc(3.0), 11, 0)?;
        let (mean, variance) = moments(&download(dev, &x)?);
        assert!((mean - 2.0).abs() < 0.11 && (variance - 9.0).abs() < 0.5, "{mean} {variance}");
        // Any cut of the sequence gives its numbers.
        let whole = (u, download(dev, &x)?);
        for (begin, end) in [(0, 1), (1, 2), (3, 10), (5, 64), (7, 1001), (6, n)] {
            let mut part = x.slice_mut(begin..end);
            dev.normal(&mut part, T::acc(2.0), T::acc(3.0), 11, begin as u64)?;
            let mut other = dev.zeros::<T>(end - begin)?;
            dev.uniform(&mut other, T::acc(0.0)..T::acc(1.0), 11, begin as u64)?;
            assert_eq!(download(dev, &other)?, whole.0[begin..end]);
        }
        assert_eq!(download(dev, &x)?, whole.1);
        Ok(())
    })
    .unwrap();
}

fn dropouts<T: Type>(gpus: Gpus) {
    let pool = gpus.pool(1);
    pool.run(|dev, _| {
        let ones = upload::<T>(dev, &vec![1.0; 5003])?;
        let mut words = dev.zeros::<u32>(5003)?;
        dev.random_bits(&mut words, 5, 2)?;
        let words = dev.download(&words)?;
        for probability in [0.0, 0.25, 0.5, 1.0] {
            let y = dev.dropout(&ones, probability, 5, 2)?;
            let kept = T::of(1.0 / (1.0 - probability)).to();
            for (y, &word) in download(dev, &y)?.into_iter().zip(&words) {
                let dropped = f64::from(word) < probability * 2f64.powi(32);
                assert_eq!(y, if dropped { 0.0 } else { kept });
            }
            let mut x = upload::<T>(dev, &vec![1.0; 5003])?;
            dev.dropout_in_place(&mut x, probability, 5, 2)?;
            assert_eq!(dev.download(&x)?, dev.download(&y)?);
        }
        Ok(())
    })
    .unwrap();
}

/// Word `element` of the sequence of `seed`, by the rounds of the paper.
fn word(element: u64, seed: u64) -> u32 {
    let block = element / 4;
    let (mut x, mut key) = ([block as u32, (block >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    for _ in 0..10 {
        let (p, q) = (0xd251_1f53 * u64::from(x[0]), 0xcd9e_8d57 * u64::from(x[2]));
        x = [(q >> 32) as u32 ^ x[1] ^ key[0], q as u32, (p >> 32) as u32 ^ x[3] ^ key[1], p as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    x[(element % 4) as usize]
}

/// The last elements of a sequence are like others, and there is none behind them.
fn last(gpus: Gpus) {
    let pool = gpus.pool(1);
    for (offset, n) in [(u64::MAX - 6, 6), (u64::MAX - 6, 7), (u64::MAX, 1), (u64::MAX - 70, 71), (u64::MAX, 0)] {
        pool.run(|dev, _| {
            let words: Vec<u32> = (0..n as u64).map(|i| word(offset + i, 9)).collect();
            let (mut bits, mut x) = (dev.zeros::<u32>(n)?, dev.zeros::<f32>(n)?);
            dev.random_bits(&mut bits, 9, offset)?;
            assert_eq!(dev.download(&bits)?, words);
            dev.uniform(&mut x, 0.0..1.0, 9, offset)?;
            let unit = |word: u32| (word >> 8) as f32 / (1 << 24) as f32;
            assert_eq!(dev.download(&x)?, words.iter().map(|&word| unit(word)).collect::<Vec<_>>());
            dev.normal(&mut x, 0.0, 1.0, 9, offset)?;
            for (i, x) in (0..n as u64).zip(dev.download(&x)?) {
                let even = (offset + i) & !1;
                let (u, v) = (f64::from(unit(word(even, 9))) + 2f64.powi(-24), f64::from(unit(word(even + 1, 9))));
                let (sine, cosine) = (2.0 * std::f64::consts::PI * v).sin_cos();
                let want = (-2.0 * u.ln()).sqrt() * if (offset + i) % 2 == 1 { sine } else { cosine };
                assert!((f64::from(x) - want).abs() < 1e-5, "{offset} + {i}: {x} instead of {want}");
            }
            let kept: Vec<f32> = words.iter().map(|&word| if word < 1 << 30 { 0.0 } else { 4.0 / 3.0 }).collect();
            let mut ones = dev.upload(&vec![1.0f32; n])?;
            assert_eq!(dev.download(&dev.dropout(&ones, 0.25, 9, offset)?)?, kept);
            dev.dropout_in_place(&mut ones, 0.25, 9, offset)?;
            assert_eq!(dev.download(&ones)?, kept);
            // f64 and half types have blocks of their own.
            for offset in [offset, u64::MAX - 6] {
                let n = n.min(7);
                dev.normal(&mut dev.zeros::<f64>(n)?, 0.0, 1.0, 9, offset)?;
                dev.uniform(&mut dev.zeros::<half::f16>(n)?, 0.0..1.0, 9, offset)?;
            }
            dev.synchronize()
        })
        .unwrap();
    }
    pool.run(|dev, _| {
        let (mut x, mut bits) = (dev.zeros::<f32>(8)?, dev.zeros::<u32>(8)?);
        let behind = u64::MAX - 6;
        let refused = [
            dev.random_bits(&mut bits, 9, behind),
            dev.uniform(&mut x, 0.0..1.0, 9, behind),
            dev.normal(&mut x, 0.0, 1.0, 9, behind),
            dev.dropout(&x, 0.5, 9, behind).map(drop),
            dev.dropout_in_place(&mut x, 0.5, 9, behind),
            // Numbers that are none.
            dev.uniform(&mut x, 0.0..f32::INFINITY, 9, 0),
            dev.uniform(&mut x, f32::MIN..f32::MAX, 9, 0),
            dev.normal(&mut x, f32::NAN, 1.0, 9, 0),
            dev.dropout(&x, f64::NAN, 9, 0).map(drop),
        ];
        for (i, refused) in refused.into_iter().enumerate() {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{i}: {error}");
        }
        Ok(())
    })
    .unwrap();
}

on_both! {
    1: fn the_end_of_a_sequence(gpus) { last(gpus) }
    1: fn uniform_and_normal(gpus) { each_type!(distributions(gpus)) }
    1: fn dropout(gpus) { each_type!(dropouts(gpus)) }

    // Random123's known answer of counter and key 0, and of a counter with a high word.
    1: fn words_are_philox(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(4)?;
            dev.random_bits(&mut x, 0, 0)?;
            assert_eq!(dev.download(&x)?, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
            let mut y = dev.zeros::<u32>(7)?;
            dev.random_bits(&mut y, 0, u64::MAX - 7)?;
            dev.random_bits(&mut dev.zeros::<u32>(0)?, 0, u64::MAX)
        })
        .unwrap();
    }

    2: fn devices_share_a_sequence(gpus) {
        let pool = gpus.pool(2);
        let parts = pool
            .run(|dev, shard| {
                let range = shard.range(1001);
                let mut x = dev.zeros::<f32>(range.len())?;
                dev.normal(&mut x, 0.0, 1.0, 99, range.start as u64)?;
                dev.download(&x)
            })
            .unwrap()
            .concat();
        let whole = pool
            .run(|dev, _| {
                let mut x = dev.zeros::<f32>(1001)?;
                dev.normal(&mut x, 0.0, 1.0, 99, 0)?;
                dev.download(&x)
            })
            .unwrap();
        assert!(whole[0] == parts && whole[1] == parts);
    }
}
