//! Random numbers and dropout.

use crate::{
    each_type, on_both,
    rig::{Type, download, upload},
    support::Gpus,
};

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
            dev.dropout_assign(&mut x, probability, 5, 2)?;
            assert_eq!(dev.download(&x)?, dev.download(&y)?);
        }
        Ok(())
    })
    .unwrap();
}

on_both! {
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
