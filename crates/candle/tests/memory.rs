//! Tensors as buffers and back, and the token.

use candle_core::{CustomOp1 as _, DType, Tensor};
use gpu_pool::{GpuPool, ReduceOp};
use gpu_pool_candle::{Error, Number, Result, adopt, all_reduce, candle_device, enter, to_buffer, to_tensor};

fn round_trip<T: Number + PartialEq>(pool: &GpuPool) -> Result<()> {
    let found = pool.try_run(|dev, _| {
        let x = Tensor::arange(0f32, 6.0, &candle_device(dev)?)?.to_dtype(<T as candle_core::WithDType>::DTYPE)?;
        let x = x.reshape((2, 3))?.t()?; // strided
        let back = to_tensor(dev, &to_buffer::<T>(dev, &x)?, (3, 2))?;
        Ok::<_, Error>(back.to_dtype(DType::F64)?.to_vec2::<f64>()?)
    })?;
    assert_eq!(found, [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]);
    Ok(())
}

#[test]
fn elements_of_all_types_come_back() -> Result<()> {
    let pool = GpuPool::builder().host(1).build()?;
    round_trip::<u8>(&pool)?;
    round_trip::<u32>(&pool)?;
    round_trip::<i32>(&pool)?;
    round_trip::<i64>(&pool)?;
    round_trip::<half::f16>(&pool)?;
    round_trip::<half::bf16>(&pool)?;
    round_trip::<f32>(&pool)?;
    round_trip::<f64>(&pool)
}

#[test]
fn an_adopted_tensor_is_not_copied() -> Result<()> {
    let pool = GpuPool::builder().host(1).build()?;
    pool.try_run(|dev, _| {
        let all = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &candle_device(dev)?)?;
        let tail = all.narrow(0, 2, 2)?;
        // SAFETY: nothing else uses the tensor until the device has ended.
        let mut buffer = unsafe { adopt::<f32>(dev, &tail)? };
        assert_eq!(dev.stats().adopted, 8);
        dev.scale(&mut buffer, 10.0)?;
        drop((buffer, tail));
        dev.synchronize()?;
        assert_eq!(all.to_vec1::<f32>()?, [1.0, 2.0, 30.0, 40.0]);
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn tensors_that_do_not_fit_are_refused() -> Result<()> {
    let pool = GpuPool::builder().host(1).build()?;
    pool.try_run(|dev, _| {
        let x = Tensor::zeros((2, 3), DType::F32, &candle_device(dev)?)?;
        let wrong = to_buffer::<f64>(dev, &x).map(drop).unwrap_err();
        assert_eq!(wrong.to_string(), "to_buffer: a tensor of [2, 3] has elements of F32, not of F64");
        // SAFETY: it is refused.
        let strided = unsafe { adopt::<f32>(dev, &x.t()?) }.map(drop).unwrap_err();
        assert!(
            strided.to_string().contains("strides of [1, 3] for a shape of [3, 2] are not contiguous"),
            "{strided}"
        );
        let short = to_tensor(dev, &dev.zeros::<f32>(5)?, (2, 3)).unwrap_err();
        assert_eq!(short.to_string(), "to_tensor: 5 elements for a shape of [2, 3]");
        let unknown = enter(dev, |_| all_reduce(&x.to_dtype(DType::I16)?, ReduceOp::Sum)).unwrap_err();
        assert!(matches!(&unknown, Error::DType { dtype: DType::I16, .. }), "{unknown:?}");
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn operations_belong_to_the_thread_and_the_time_of_enter() -> Result<()> {
    let pool = GpuPool::builder().host(2).build()?;
    pool.try_run(|dev, _| {
        let x = Tensor::zeros(1, DType::F32, &candle_device(dev)?)?;
        let sum = |x: &Tensor| all_reduce(x, ReduceOp::Sum).map(drop);
        let is_none = |found: Result<()>| matches!(found, Err(Error::NoDevice { op: "all_reduce", .. }));
        assert!(is_none(sum(&x)), "before");
        enter(dev, |_| {
            let other = std::thread::scope(|scope| scope.spawn(|| sum(&x)).join().expect("no panic"));
            assert!(is_none(other), "another thread");
            sum(&x)
        })?;
        assert!(is_none(sum(&x)), "after");
        Ok::<_, Error>(())
    })?;
    Ok(())
}

/// An operation whose backward pass calls a collective, as those of this crate do.
struct Fails;
impl candle_core::CustomOp1 for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }
    fn cpu_fwd(
        &self,
        s: &candle_core::CpuStorage,
        l: &candle_core::Layout,
    ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(all_reduce(gradient, ReduceOp::Sum)?))
    }
}

#[test]
fn a_failure_of_one_device_passes_through_candle() -> Result<()> {
    let pool = GpuPool::builder().host(2).build()?;
    assert_eq!(Fails.name(), "fails");
    let failed = pool.try_run(|dev, _| {
        enter(dev, |device| {
            if dev.index() == 1 {
                return Err(gpu_pool::Error::custom("the data are gone").into());
            }
            let x = candle_core::Var::zeros(1, DType::F32, device)?;
            let stopped = x.apply_op1(Fails)?.backward().map_err(Error::from).unwrap_err();
            assert!(matches!(stopped, Error::Pool(gpu_pool::Error::Aborted { .. })), "{stopped:?}");
            Err(stopped)
        })
    });
    let cause = failed.map(|_: Vec<()>| ()).unwrap_err();
    assert_eq!(cause.to_string(), "the data are gone");
    // The pool still works.
    let sums = pool.try_run(|dev, _| {
        enter(dev, |device| Ok(all_reduce(&Tensor::ones(1, DType::F32, device)?, ReduceOp::Sum)?.to_vec1::<f32>()?))
    })?;
    assert_eq!(sums, [[2.0], [2.0]]);
    Ok(())
}
