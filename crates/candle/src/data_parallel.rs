//! [`DataParallel`]: candle's training loop on several devices.
//!
//! A step reads its weights through taps: identities whose backward pass gets the complete gradient of a weight and
//! gives it to gpu-pool's [`GradientExchange`], which exchanges it beside the rest of the backward pass.

use crate::collective::broadcast;
use crate::device::{enter, with_token};
use crate::memory::{Number, dispatch, located, part, to_tensor};
use crate::{Error, Result};
use candle_core::{
    CpuStorage, CustomOp1, DType, Layout, Shape, Storage, Tensor, Var, backend::BackendStorage as _,
    backprop::GradStore,
};
use candle_nn::{Init, VarBuilder, VarMap, var_builder::SimpleBackend};
use gpu_pool::{
    Device,
    gradients::{Gradient, GradientExchange, GradientExchangeBuilder},
    half::{bf16, f16},
};
use std::{
    cell::RefCell,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

scoped_tls::scoped_thread_local!(static BACKWARD: RefCell<Backward>);

/// One device's replica of a candle model, and its part in the exchange of gradients. Keep it on its device: in the
/// scope that made it, or in a [`PerDevice`](gpu_pool::PerDevice). The guide's page "With candle" has a program.
///
/// The step builds the model anew: layers of `candle_nn` are only names of weights, so that takes microseconds. A tap
/// copies its weight, on the device.
///
/// **Weights without a gradient.** A weight that a step does not read is no error; its gradient is that of the other
/// devices, or none. A weight that it reads, and that the backward pass does not reach, is [`Error::NoGradient`] with
/// its name: candle's fused operations have no backward pass, and end it silently.
///
/// **Order.** Names are sorted, so the order of [`VarMap`], which is random, does not matter.
pub struct DataParallel {
    taps: Taps,
    running: RefCell<Backward>,
    device: candle_core::Device,
    dtype: DType,
    optional: Vec<String>,
}

debug_as!(DataParallel, |self| weights = self.names(), ..);

impl DataParallel {
    /// A replica of all variables of `weights`. All devices of the scope call it, and get the values of rank 0.
    ///
    /// # Errors
    /// [`Error::ModelsDiffer`] on all devices if names, shapes or types differ; [`Error::DType`] if a weight has
    /// another type than the first one, or none of f32, f64, f16 and bf16; those of [`GradientExchangeBuilder::build`].
    #[track_caller]
    pub fn new(dev: &Device, weights: &VarMap) -> Result<Self> {
        Self::with(dev, weights, GradientExchange::builder())
    }

    /// [`new`](Self::new) with other settings: size of buckets, type on the wire, norm. Gradients are averages over
    /// devices, or with [`ReduceOp::Scaled`](gpu_pool::ReduceOp::Scaled) weighted sums. Errors: as [`new`](Self::new).
    #[track_caller]
    pub fn with(dev: &Device, weights: &VarMap, settings: GradientExchangeBuilder) -> Result<Self> {
        let data = weights.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut vars: Vec<(String, Var)> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        drop(data);
        vars.sort_by(|(a, _), (b, _)| a.cmp(b));
        compare(dev, &vars)?;
        let dtype = vars.first().map_or(DType::F32, |(_, var)| var.dtype());
        if let Some((name, var)) = vars.iter().find(|(_, var)| var.dtype() != dtype) {
            let wanted = format!("the first weight of {dtype:?}: train weights of several types as several models");
            return Err(Error::DType { op: "DataParallel", what: name.clone(), dtype: var.dtype(), wanted });
        }
        let sizes: Vec<usize> = vars.iter().map(|(_, var)| var.elem_count()).collect();
        let exchange: Box<dyn Exchange> = match dtype {
            DType::F32 => Box::new(settings.build(dev, &sizes)?),
            DType::F64 => Box::new(settings.of::<f64>().build(dev, &sizes)?),
            DType::F16 => Box::new(settings.of::<f16>().build(dev, &sizes)?),
            DType::BF16 => Box::new(settings.of::<bf16>().build(dev, &sizes)?),
            _ => {
                let what = vars.first().map_or_else(String::new, |(name, _)| name.clone());
                let wanted = "and gradients are of f32, f64, f16 or bf16".into();
                return Err(Error::DType { op: "DataParallel", what, dtype, wanted });
            }
        };
        let device = enter(dev, |device| {
            for (_, var) in &vars {
                var.set(&broadcast(var, 0)?)?;
            }
            Ok(device.clone())
        })?;
        let read = Arc::new(Mutex::new(vec![None; vars.len()]));
        let taps = Taps { vars: vars.into(), read };
        let ready = vec![false; taps.vars.len()];
        let running = RefCell::new(Backward { owner: Arc::downgrade(&taps.read), exchange, ready, failed: false });
        Ok(DataParallel { taps, running, device, dtype, optional: Vec::new() })
    }

    /// Weights whose names begin with one of these may be read without getting a gradient, for example the branches of
    /// a model that a batch does not take. Such a gradient counts as zero.
    #[must_use]
    pub fn may_lack_gradients(mut self, prefixes: &[&str]) -> Self {
        self.optional = prefixes.iter().map(ToString::to_string).collect();
        self
    }

    /// The names of the weights, sorted: gradient `i` of the exchange is that of name `i`.
    pub fn names(&self) -> Vec<&str> {
        self.taps.vars.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The number of gradients that are exchanged together.
    pub fn buckets(&self) -> usize {
        self.running.borrow().exchange.buckets()
    }

    /// This device's weight from the next step on, with [`ReduceOp::Scaled`](gpu_pool::ReduceOp::Scaled): its rows /
    /// all rows. Errors: those of [`GradientExchange::set_weight`].
    pub fn set_weight(&mut self, weight: f64) -> Result<()> {
        self.running.get_mut().exchange.set_weight(weight)
    }

    /// A step: `loss` builds the model from its [`VarBuilder`] and computes the loss; then follow the backward pass and
    /// the exchange. Returns this device's loss, and the gradients of all devices for candle's optimizers, with one for
    /// each weight that had one on any device. All devices call it.
    ///
    /// A tensor of the builder counts for this step only.
    ///
    /// # Errors
    /// [`Error::NoGradient`], [`Error::Untapped`]; those of `loss`, of candle, and of
    /// [`GradientExchange::finish`]. After a failed step, build a new [`DataParallel`].
    pub fn step(
        &mut self,
        dev: &Device,
        loss: impl FnOnce(VarBuilder<'static>) -> Result<Tensor>,
    ) -> Result<(Tensor, GradStore)> {
        enter(dev, |_| {
            self.taps.read().fill(None);
            let builder = Box::new(self.taps.clone());
            let loss = loss(VarBuilder::from_backend(builder, self.dtype, self.device.clone()))?;
            let running = self.begin()?;
            running.ready.fill(false);
            let gradients = BACKWARD.set(&self.running, || loss.backward())?;
            let running = self.running.get_mut();
            let lacks = |(index, (name, _)): (usize, &(String, Var))| {
                let read = self.taps.read()[index].is_some() && !running.ready[index];
                let lacks = read && !self.optional.iter().any(|prefix| name.starts_with(prefix));
                lacks.then(|| name.clone())
            };
            let names: Vec<String> = self.taps.vars.iter().enumerate().filter_map(lacks).collect();
            fail_if!(!names.is_empty(), Error::NoGradient { names });
            if let Some((name, _)) = self.taps.vars.iter().find(|(_, var)| gradients.get(var).is_some()) {
                return Err(Error::Untapped { name: name.clone() });
            }
            if !running.ready.contains(&true) {
                running.exchange.nothing();
            }
            Ok((loss, self.finish(dev, gradients)?))
        })
    }

    /// A step of a device that has no rows: its gradients count as zero. Errors: those of [`GradientExchange::finish`].
    pub fn step_without_rows(&mut self, dev: &Device) -> Result<GradStore> {
        enter(dev, |_| {
            self.begin()?.exchange.nothing();
            self.finish(dev, GradStore::default())
        })
    }

    /// A step that begins has failed until it ends.
    fn begin(&mut self) -> Result<&mut Backward> {
        let running = self.running.get_mut();
        match std::mem::replace(&mut running.failed, true) {
            true => Err(Error::invalid("step", "an earlier step has failed")),
            false => Ok(running),
        }
    }

    fn finish(&mut self, dev: &Device, mut gradients: GradStore) -> Result<GradStore> {
        let running = self.running.get_mut();
        let unused = with_token("step", |dev| running.exchange.finish(dev))?;
        for (index, (_, var)) in self.taps.vars.iter().enumerate().filter(|(index, _)| !unused.contains(index)) {
            gradients.insert(var, running.exchange.gradient(dev, index, var.shape())?);
        }
        running.failed = false;
        self.taps.read().fill(None); // copies of weights
        Ok(gradients)
    }
}

/// Names, types and shapes are the same on all devices.
#[track_caller]
fn compare(dev: &Device, vars: &[(String, Var)]) -> Result<()> {
    let own: Vec<String> =
        vars.iter().map(|(name, var)| format!("{name} ({:?} {:?})", var.dtype(), var.dims())).collect();
    let all = dev.exchange(own)?;
    for (rank, other) in all.iter().enumerate().skip(1) {
        let longest = all[0].len().max(other.len());
        if let Some(at) = (0..longest).find(|&at| all[0].get(at) != other.get(at)) {
            let has = [&all[0], other].map(|all| all.get(at).cloned().unwrap_or_else(|| "no further weight".into()));
            return Err(Error::ModelsDiffer { ranks: [0, rank], has });
        }
    }
    Ok(())
}

type Read = Mutex<Vec<Option<Tensor>>>;

/// The weights of a model as a step reads them.
#[derive(Clone)]
struct Taps {
    vars: Arc<[(String, Var)]>,
    /// By weight: its tensor in this step. One tap gets the whole gradient, also of weights that are read twice.
    read: Arc<Read>,
}

impl Taps {
    fn read(&self) -> MutexGuard<'_, Vec<Option<Tensor>>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.vars.binary_search_by(|(known, _)| known.as_str().cmp(name)).ok()
    }
}

impl SimpleBackend for Taps {
    fn get(
        &self,
        s: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        dev: &candle_core::Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, dev)?;
        if *tensor.shape() != s {
            let (msg, expected, got) = (format!("shape mismatch for {name}"), s, tensor.shape().clone());
            return Err(candle_core::Error::UnexpectedShape { msg, expected, got });
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &candle_core::Device) -> candle_core::Result<Tensor> {
        let Some(index) = self.index(name) else {
            return Err(candle_core::Error::CannotFindTensor { path: name.to_string() });
        };
        if let Some(tensor) = &self.read()[index] {
            return tensor.to_dtype(dtype);
        }
        let owner = Arc::downgrade(&self.read);
        let tensor = self.vars[index].1.contiguous()?.apply_op1(Tap { owner, index })?;
        self.read()[index] = Some(tensor.clone());
        tensor.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.index(name).is_some()
    }
}

struct Backward {
    /// Tells the taps of one model from another's.
    owner: Weak<Read>,
    exchange: Box<dyn Exchange>,
    ready: Vec<bool>,
    failed: bool,
}

/// The identity; backward it takes the weight's gradient. candle visits an operation after all uses of its result.
struct Tap {
    owner: Weak<Read>,
    index: usize,
}

impl CustomOp1 for Tap {
    fn name(&self) -> &'static str {
        "tap"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        use candle_core::WithDType as _;
        let copy: Result<_> = dispatch!("tap", s.dtype(), T => Ok(T::to_cpu_storage(part(s.as_slice::<T>()?, l))));
        Ok((copy?, l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s: &candle_core::CudaStorage,
        l: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        Ok((s.try_clone(l)?, l.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if !(BACKWARD.is_set() && BACKWARD.with(|running| running.borrow().owner.ptr_eq(&self.owner))) {
            let also = ", by the `DataParallel::step` that has read the weight";
            return Err(Error::NoDevice { op: "tap", also }.into());
        }
        BACKWARD.with(|running| {
            let running = &mut *running.borrow_mut();
            with_token("tap", |dev| running.exchange.ready(dev, self.index, &gradient.contiguous()?))?;
            running.ready[self.index] = true;
            // The weight's gradient comes from the exchange.
            Ok(None)
        })
    }
}

trait Exchange {
    fn ready(&mut self, dev: &Device, index: usize, gradient: &Tensor) -> Result<()>;
    /// The gradients that no device had.
    fn finish(&mut self, dev: &Device) -> Result<Vec<usize>>;
    fn gradient(&self, dev: &Device, index: usize, shape: &Shape) -> Result<Tensor>;
    fn set_weight(&mut self, weight: f64) -> Result<()>;
    fn nothing(&mut self);
    fn buckets(&self) -> usize;
}

impl<T: Number + Gradient> Exchange for GradientExchange<T> {
    fn ready(&mut self, dev: &Device, index: usize, gradient: &Tensor) -> Result<()> {
        let (storage, layout) = located::<T>("tap", dev, gradient)?.storage_and_layout();
        match &*storage {
            Storage::Cpu(cpu) => dev.upload_into(part(cpu.as_slice::<T>()?, layout), &mut self.grad_mut(index)?)?,
            #[cfg(feature = "cuda")]
            Storage::Cuda(cuda) => {
                // SAFETY: the token's stream is candle's, which writes and frees the memory in this order.
                let own = unsafe { crate::memory::gpu::adopt::<T>(dev, cuda, layout, ())? };
                dev.copy(&own, &mut self.grad_mut(index)?)?;
            }
            _ => return Err(candle_core::Error::NotCompiledWithCudaSupport.into()),
        }
        Ok(GradientExchange::ready(self, dev, index)?)
    }

    fn finish(&mut self, dev: &Device) -> Result<Vec<usize>> {
        Ok(GradientExchange::finish(self, dev)?.unused().to_vec())
    }

    fn gradient(&self, dev: &Device, index: usize, shape: &Shape) -> Result<Tensor> {
        to_tensor(dev, &self.grad(index)?, shape)
    }

    fn set_weight(&mut self, weight: f64) -> Result<()> {
        Ok(GradientExchange::set_weight(self, weight)?)
    }

    fn nothing(&mut self) {
        GradientExchange::nothing(self);
    }

    fn buckets(&self) -> usize {
        GradientExchange::buckets(self)
    }
}
