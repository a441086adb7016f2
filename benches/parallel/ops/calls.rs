//! The operations, under the names that `benches/peers/ops.py` knows them by.

use gpu_pool::{Matrix, Result};
use gpu_pool_train::{Activation::*, prelude::*};

use super::rig::{Kept, Number, Run};

/// An operation.
pub struct Call<T: Number> {
    pub name: &'static str,
    pub run: Run<T>,
    /// Forms of the peer.
    pub peers: &'static [&'static str],
}

fn call<T: Number>(name: &'static str, run: Run<T>) -> Call<T> {
    Call { name, run, peers: &["torch"] }
}

/// Two of torch's functions, which `torch.compile` makes one kernel.
fn fused<T: Number>(name: &'static str, run: Run<T>) -> Call<T> {
    Call { name, run, peers: &["torch", "torch.compile"] }
}

fn kept<R: 'static>(made: Result<R>) -> Result<Kept> {
    Ok(Box::new(made?))
}

/// Every kernel once; forms in place are the same kernels.
pub fn all<T: Number>() -> Vec<Call<T>> {
    [simple(), activations(), rows(), norms(), shapes(), random(), products(), T::further()]
        .into_iter()
        .flatten()
        .collect()
}

fn simple<T: Number>() -> Vec<Call<T>> {
    vec![
        call("fill", |dev, r, i| kept(dev.fill(&mut r.y[i], T::ONE))),
        call("scale", |dev, r, i| kept(dev.scale(&mut r.y[i], -1.0))),
        call("axpy", |dev, r, i| kept(dev.axpy(0.5, &r.x[i], &mut r.y[i]))),
        call("sum", |dev, r, i| kept(dev.sum(&r.x[i]))),
        call("dot", |dev, r, i| kept(dev.dot(&r.x[i], &r.dy[i]))),
        call("cast", |dev, r, i| kept(dev.cast::<T::Other, _>(&r.x[i]))),
        call("add", |dev, r, i| kept(dev.add(&r.x[i], &r.dy[i]))),
        call("mul", |dev, r, i| kept(dev.mul(&r.x[i], &r.dy[i]))),
    ]
}

fn activations<T: Number>() -> Vec<Call<T>> {
    vec![
        call("relu", |dev, r, i| kept(dev.activation(Relu, &r.x[i]))),
        call("relu_backward", |dev, r, i| kept(dev.activation_backward(Relu, &r.dy[i], &r.x[i]))),
        call("gelu", |dev, r, i| kept(dev.activation(Gelu, &r.x[i]))),
        call("gelu_backward", |dev, r, i| kept(dev.activation_backward(Gelu, &r.dy[i], &r.x[i]))),
        call("gelu_tanh", |dev, r, i| kept(dev.activation(GeluTanh, &r.x[i]))),
        call("gelu_tanh_backward", |dev, r, i| kept(dev.activation_backward(GeluTanh, &r.dy[i], &r.x[i]))),
        call("silu", |dev, r, i| kept(dev.activation(Silu, &r.x[i]))),
        call("silu_backward", |dev, r, i| kept(dev.activation_backward(Silu, &r.dy[i], &r.x[i]))),
        call("bias", |dev, r, i| kept(dev.activation(Identity.biased(&r.beta), &r.x[i]))),
        call("bias_relu", |dev, r, i| kept(dev.activation(Relu.biased(&r.beta), &r.x[i]))),
        fused("bias_gelu", |dev, r, i| kept(dev.activation(Gelu.biased(&r.beta), &r.x[i]))),
        fused("bias_gelu_backward", |dev, r, i| kept(dev.activation_backward(Gelu.biased(&r.beta), &r.dy[i], &r.x[i]))),
    ]
}

fn rows<T: Number>() -> Vec<Call<T>> {
    vec![
        call("softmax", |dev, r, i| kept(dev.softmax(&r.x[i], r.cols))),
        call("softmax_backward", |dev, r, i| kept(dev.softmax_backward(&r.dy[i], &r.x[i], r.cols))),
        call("log_softmax", |dev, r, i| kept(dev.log_softmax(&r.x[i], r.cols))),
        call("log_softmax_backward", |dev, r, i| kept(dev.log_softmax_backward(&r.dy[i], &r.x[i], r.cols))),
        call("cross_entropy", |dev, r, i| kept(dev.cross_entropy(&r.x[i], &r.labels, 1.0))),
        call("cross_entropy_loss", |dev, r, i| kept(dev.cross_entropy_loss(&r.x[i], &r.labels))),
        call("argmax", |dev, r, i| kept(dev.argmax(&r.x[i], r.cols))),
        call("column_sum", |dev, r, i| kept(dev.column_sum_into(&r.x[i], &mut r.dbeta))),
    ]
}

fn norms<T: Number>() -> Vec<Call<T>> {
    vec![
        call("layer_norm", |dev, r, i| kept(dev.layer_norm(&r.x[i], &r.gamma, &r.beta, 1e-5))),
        call("layer_norm_backward", |dev, r, i| {
            kept(dev.layer_norm_backward(&r.dy[i], &r.x[i], &r.gamma, &r.mean, &r.rstd))
        }),
        call("layer_norm_weights_backward", |dev, r, i| {
            let (dgamma, dbeta) = (&mut r.dgamma, &mut r.dbeta);
            kept(dev.layer_norm_weights_backward(&r.dy[i], &r.x[i], &r.mean, &r.rstd, dgamma, dbeta))
        }),
        call("rms_norm", |dev, r, i| kept(dev.rms_norm(&r.x[i], &r.gamma, 1e-5))),
        call("rms_norm_backward", |dev, r, i| kept(dev.rms_norm_backward(&r.dy[i], &r.x[i], &r.gamma, &r.rstd))),
        call("rms_norm_weights_backward", |dev, r, i| {
            kept(dev.rms_norm_weights_backward(&r.dy[i], &r.x[i], &r.rstd, &mut r.dgamma))
        }),
    ]
}

fn shapes<T: Number>() -> Vec<Call<T>> {
    vec![
        call("transpose", |dev, r, i| kept(dev.transpose(&r.x[i], r.rows, r.cols))),
        call("copy_2d", |dev, r, i| {
            let half = r.cols / 2;
            kept(dev.copy_2d(&r.x[i], r.cols, &mut r.y[i], half, r.rows, half))
        }),
        call("embedding", |dev, r, i| kept(dev.embedding(&r.x[i], r.cols, &r.indices))),
        call("embedding_backward", |dev, r, i| kept(dev.embedding_backward(&r.dy[i], r.cols, &r.indices, &mut r.y[i]))),
    ]
}

fn random<T: Number>() -> Vec<Call<T>> {
    vec![
        call("random_bits", |dev, r, i| kept(dev.random_bits(&mut r.words, 1, i as u64))),
        call("uniform", |dev, r, i| kept(dev.uniform(&mut r.y[i], -0.1..0.1, 1, 0))),
        call("normal", |dev, r, i| kept(dev.normal(&mut r.y[i], 0.0, 1.0, 1, 0))),
        call("dropout", |dev, r, i| kept(dev.dropout(&r.x[i], 0.5, 1, 0))),
    ]
}

/// A product of `rows x cols` by `cols x cols`; that of `f32` is without TF32.
fn products<T: Number>() -> Vec<Call<T>> {
    vec![call("gemm", |dev, r, i| {
        let (x, w) = (Matrix::new(&r.x[i], r.rows, r.cols)?, Matrix::new(&r.square, r.cols, r.cols)?);
        kept(dev.gemm(1.0, x, w, 0.0, &mut r.y[i]))
    })]
}

/// Operations of `f32` only.
pub fn of_f32() -> Vec<Call<f32>> {
    vec![call("gemm_tf32", |dev, r, i| {
        let (x, w) = (Matrix::new(&r.x[i], r.rows, r.cols)?, Matrix::new(&r.square, r.cols, r.cols)?);
        kept(dev.gemm_tf32(1.0, x, w, 0.0, &mut r.y[i]))
    })]
}
