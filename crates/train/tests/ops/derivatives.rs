//! Steps back against finite differences, in `f64`: the derivative of a weighted sum of what the step forward gives.

use crate::{
    on_both, pointwise,
    rig::{check, values},
};
use gpu_pool_train::prelude::*;

const ROWS: usize = 3;
const COLS: usize = 5;

on_both! {
    1: fn of_activations(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, w, b) = (values::<f64>(15, 1), values::<f64>(15, 2), values::<f64>(COLS, 3));
            let (on, dy, bias) = (dev.upload(&x)?, dev.upload(&w)?, dev.upload(&b)?);
            for f in pointwise::ALL {
                let dx = dev.activation_backward(f, &dy, &on)?;
                check(dev, &x, &w, &dx, |x| dev.activation(f, x))?;
                let dx = dev.activation_backward(f.biased(&bias), &dy, &on)?;
                check(dev, &x, &w, &dx, |x| dev.activation(f.biased(&bias), x))?;
                let mut db = dev.zeros::<f64>(COLS)?;
                dev.column_sum_into(&dx, &mut db)?;
                check(dev, &b, &w, &db, |bias| dev.activation(f.biased(bias), &on))?;
            }
            Ok(())
        })
        .unwrap();
    }

    1: fn of_softmax_and_cross_entropy(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, w) = (values::<f64>(ROWS * COLS, 4), values::<f64>(ROWS * COLS, 5));
            let (on, dy) = (dev.upload(&x)?, dev.upload(&w)?);
            let dx = dev.softmax_backward(&dy, &dev.softmax(&on, COLS)?, COLS)?;
            check(dev, &x, &w, &dx, |x| dev.softmax(x, COLS))?;
            let dx = dev.log_softmax_backward(&dy, &dev.log_softmax(&on, COLS)?, COLS)?;
            check(dev, &x, &w, &dx, |x| dev.log_softmax(x, COLS))?;
            let labels = dev.upload(&[4u32, 0, 2])?;
            let (_, dx) = dev.cross_entropy(&on, &labels, 0.5)?;
            check(dev, &x, &[0.5; ROWS], &dx, |x| dev.cross_entropy_loss(x, &labels))
        })
        .unwrap();
    }

    1: fn of_norms(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (x, w) = (values::<f64>(ROWS * COLS, 6), values::<f64>(ROWS * COLS, 7));
            let (g, b) = (values::<f64>(COLS, 8), values::<f64>(COLS, 9));
            let (on, dy, gamma, beta) = (dev.upload(&x)?, dev.upload(&w)?, dev.upload(&g)?, dev.upload(&b)?);
            let (_, mean, rstd) = dev.layer_norm(&on, &gamma, &beta, 0.1)?;
            let dx = dev.layer_norm_backward(&dy, &on, &gamma, &mean, &rstd)?;
            check(dev, &x, &w, &dx, |x| Ok(dev.layer_norm(x, &gamma, &beta, 0.1)?.0))?;
            let (mut dgamma, mut dbeta) = (dev.zeros::<f64>(COLS)?, dev.zeros::<f64>(COLS)?);
            dev.layer_norm_weights_backward(&dy, &on, &mean, &rstd, &mut dgamma, &mut dbeta)?;
            check(dev, &g, &w, &dgamma, |gamma| Ok(dev.layer_norm(&on, gamma, &beta, 0.1)?.0))?;
            check(dev, &b, &w, &dbeta, |beta| Ok(dev.layer_norm(&on, &gamma, beta, 0.1)?.0))?;

            let (_, rstd) = dev.rms_norm(&on, &gamma, 0.1)?;
            let dx = dev.rms_norm_backward(&dy, &on, &gamma, &rstd)?;
            check(dev, &x, &w, &dx, |x| Ok(dev.rms_norm(x, &gamma, 0.1)?.0))?;
            dev.rms_norm_weights_backward(&dy, &on, &rstd, &mut dgamma)?;
            check(dev, &g, &w, &dgamma, |gamma| Ok(dev.rms_norm(&on, gamma, 0.1)?.0))
        })
        .unwrap();
    }

    1: fn of_embedding_and_dropout(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (table, w) = (values::<f64>(4 * COLS, 10), values::<f64>(ROWS * COLS, 11));
            let (dy, indices) = (dev.upload(&w)?, dev.upload(&[3u32, 0, 3])?);
            let mut dtable = dev.zeros::<f64>(4 * COLS)?;
            dev.embedding_backward(&dy, COLS, &indices, &mut dtable)?;
            check(dev, &table, &w, &dtable, |table| dev.embedding(table, COLS, &indices))?;
            let mut dx = dev.upload(&w)?;
            dev.dropout_in_place(&mut dx, 0.4, 9, 7)?;
            check(dev, &values::<f64>(ROWS * COLS, 12), &w, &dx, |x| dev.dropout(x, 0.4, 9, 7))
        })
        .unwrap();
    }
}
