//! Each public operation that can fail is called wrongly: its error names the function, and its call in this file.
//!
//! `.ci/places.py` compares this table with rustdoc's pages, so that no function is forgotten: it reads the names in
//! [`told`] and [`both`]. The `EXCEPTED` of the crate stand in `parallel/places.rs`.

use crate::{
    support,
    told::{group_of, on_one_of, told},
};
use gpu_pool_train::{Activation, RowNorm, prelude::*};

/// The same call of a device and of a group.
macro_rules! both {
    ($dev:ident, $name:ident($($arg:expr),* $(,)?)) => {
        told(concat!("Device::", stringify!($name)), $dev.$name($($arg),*));
        told(concat!("Group::", stringify!($name)), group_of($dev).$name($($arg),*));
    };
}

#[test]
fn collectives_have_places() {
    on_one_of(support::builder(), |dev, _| {
        let (x, mut y, mut rows) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(5)?, dev.zeros::<f32>(5)?);
        both!(dev, all_reduce_norm(&mut y, &mut rows, RowNorm::rms(&x, 1e-5)));
        both!(dev, all_reduce_norm_into(&x, &mut rows, RowNorm::rms(&x, 1e-5), &mut y));
        Ok(())
    });
}

#[test]
fn operations_have_places() {
    on_one_of(support::builder(), |dev, far| {
        let relu = Activation::Relu;
        let (x, mut y, one) = (dev.zeros::<f32>(4)?, dev.zeros::<f32>(5)?, dev.zeros::<f32>(1)?);
        let labels = dev.zeros::<u32>(3)?;
        told("Device::add", dev.add(&x, &y));
        told("Device::add_into", dev.add_into(&x, &x, &mut y));
        told("Device::add_in_place", dev.add_in_place(&mut y, &x));
        told("Device::sub", dev.sub(&x, &y));
        told("Device::sub_into", dev.sub_into(&x, &x, &mut y));
        told("Device::sub_in_place", dev.sub_in_place(&mut y, &x));
        told("Device::mul", dev.mul(&x, &y));
        told("Device::mul_into", dev.mul_into(&x, &x, &mut y));
        told("Device::mul_in_place", dev.mul_in_place(&mut y, &x));
        told("Device::div", dev.div(&x, &y));
        told("Device::div_into", dev.div_into(&x, &x, &mut y));
        told("Device::div_in_place", dev.div_in_place(&mut y, &x));
        told("Device::minimum", dev.minimum(&x, &y));
        told("Device::minimum_into", dev.minimum_into(&x, &x, &mut y));
        told("Device::minimum_in_place", dev.minimum_in_place(&mut y, &x));
        told("Device::maximum", dev.maximum(&x, &y));
        told("Device::maximum_into", dev.maximum_into(&x, &x, &mut y));
        told("Device::maximum_in_place", dev.maximum_in_place(&mut y, &x));
        told("Device::min", dev.min(&dev.zeros::<f32>(0)?));
        told("Device::max", dev.max(&dev.zeros::<f32>(0)?));
        told("Device::exp", dev.exp(far));
        told("Device::exp_in_place", dev.exp_in_place(far));
        told("Device::sqrt", dev.sqrt(far));
        told("Device::sqrt_in_place", dev.sqrt_in_place(far));
        told("Device::inclusive_sum", dev.inclusive_sum(far));
        told("Device::exclusive_sum", dev.exclusive_sum(far));
        told("Device::sort", dev.sort(far));
        told("Device::sort_in_place", dev.sort_in_place(far));
        told("Device::relu", dev.relu(far));
        told("Device::gelu", dev.gelu(far));
        told("Device::gelu_tanh", dev.gelu_tanh(far));
        told("Device::silu", dev.silu(far));
        told("Device::activation", dev.activation(relu, far));
        told("Device::activation_into", dev.activation_into(relu, &x, &mut y));
        told("Device::activation_in_place", dev.activation_in_place(relu, far));
        told("Device::activation_backward", dev.activation_backward(relu, &x, &y));
        told("Device::activation_backward_in_place", dev.activation_backward_in_place(relu, &mut y, &x));
        told("Device::activation", dev.activation(relu.biased(&x), &y));
        told("Device::activation_in_place", dev.activation_in_place(relu.biased(&x), &mut y));
        told("Device::activation_backward", dev.activation_backward(relu.biased(&x), &x, &y));
        told("Device::activation_backward_in_place", dev.activation_backward_in_place(relu.biased(&x), &mut y, &x));
        told("Device::embedding", dev.embedding(&x, 3, &labels));
        told("Device::embedding_backward", dev.embedding_backward(&x, 3, &labels, &mut y));
        told("Device::random_bits", dev.random_bits(&mut dev.zeros::<u32>(4)?, 0, u64::MAX));
        told("Device::uniform", dev.uniform(far, 0.0..1.0, 0, 0));
        told("Device::normal", dev.normal(far, 0.0, 1.0, 0, 0));
        told("Device::dropout", dev.dropout(&x, 2.0, 0, 0));
        told("Device::dropout_in_place", dev.dropout_in_place(&mut y, 2.0, 0, 0));
        told("Device::argmax", dev.argmax(&x, 3));
        told("Device::column_sum_into", dev.column_sum_into(&y, &mut dev.zeros::<f32>(3)?));
        told("Device::check_indices", dev.check_indices(&labels, 0));
        told("Device::layer_norm", dev.layer_norm(&y, &x, &x, 1e-5));
        told("Device::layer_norm_backward", dev.layer_norm_backward(&x, &y, &x, &one, &one));
        told(
            "Device::layer_norm_weights_backward",
            dev.layer_norm_weights_backward(&x, &y, &one, &one, &mut dev.zeros::<f32>(4)?, &mut dev.zeros::<f32>(4)?),
        );
        told("Device::rms_norm", dev.rms_norm(&y, &x, 1e-5));
        told("Device::rms_norm_backward", dev.rms_norm_backward(&x, &y, &x, &one));
        let rms = dev.rms_norm_weights_backward(&x, &y, &one, &mut dev.zeros::<f32>(4)?);
        told("Device::rms_norm_weights_backward", dev.rms_norm_weights_backward(&x, &y, &one, far).and(rms));
        told("Device::softmax", dev.softmax(&x, 3));
        told("Device::softmax_in_place", dev.softmax_in_place(&mut y, 3));
        told("Device::softmax_backward", dev.softmax_backward(&x, &y, 2));
        told("Device::log_softmax", dev.log_softmax(&x, 3));
        told("Device::log_softmax_in_place", dev.log_softmax_in_place(&mut y, 3));
        told("Device::log_softmax_backward", dev.log_softmax_backward(&x, &y, 2));
        told("Device::cross_entropy", dev.cross_entropy(&x, &labels, 1.0));
        told("Device::cross_entropy_in_place", dev.cross_entropy_in_place(&mut y, &labels, 1.0));
        told("Device::cross_entropy_loss", dev.cross_entropy_loss(&x, &labels));
        told("Device::transpose", dev.transpose(&x, 3, 3));
        told("Device::transpose_batch", dev.transpose_batch(&x, 2, 3, 3));
        told("Device::transpose_into", dev.transpose_into(&x, 2, 2, &mut y));
        told("Device::copy_2d", dev.copy_2d(&x, 4, &mut y, 4, 3, 4));
        Ok(())
    });
}
