//! Tensors of other libraries by DLPack, both ways. (dlpark's own tests of versions, flags and strides; what numpy and
//! torch make of them is `.ci/dlpack.sh`.)

use crate::{
    on_both,
    support::{failure, slow_add},
};
use gpu_pool::{
    Device, Error, Result,
    dlpack::dlpark::{
        DlpackFlags,
        ffi::{DLDataType, DLDevice, DLTensor},
        metadata::Dynamic,
        versioned::Dlpack,
    },
};
use std::sync::Arc;

/// A tensor of other code on the CPU: these values and strides, and its owner.
fn tensor(values: &[i32], shape: &[i64], strides: &[i64], flags: DlpackFlags, owner: &Arc<()>) -> Dlpack {
    let mut memory = values.to_vec();
    let data = memory.as_mut_ptr();
    let metadata = Dynamic::new(shape.to_vec(), strides.to_vec());
    let mut made = metadata.initialize(Box::new((memory, owner.clone()))).unwrap();
    made.set_data(data.cast()).set_dtype(DLDataType::I32).set_device(DLDevice::CPU);
    made.set_flags(flags).unwrap();
    // SAFETY: the context keeps so many values.
    unsafe { made.finish() }
}

fn released(owner: &Arc<()>) -> bool {
    Arc::strong_count(owner) == 1
}

on_both! {
    // The exported memory comes back to its pool when the other library lets go, on any thread.
    1: fn a_buffer_goes_out_and_comes_back(gpus) {
        let pool = gpus.run(1, |dev| {
            let mut x = dev.upload(&[1u32, 2, 3, 4, 5, 6])?;
            slow_add(dev, &mut x, 10, 20_000)?;
            let before = dev.stats().in_use;
            let tensor = dev.to_dlpack(x, &[3, 2])?;
            assert_eq!(tensor.validate().unwrap().shape(), [3, 2]);
            assert_eq!(tensor.validate().unwrap().strides().unwrap(), [2, 1]);
            if !gpus.is_cuda() {
                // SAFETY: six values; the export has waited for the kernel.
                assert_eq!(unsafe { tensor.tensor().cpu_slice::<u32>() }.unwrap(), [11, 12, 13, 14, 15, 16]);
            }
            // SAFETY: nothing else has the tensor.
            let back = unsafe { dev.from_dlpack::<u32>(tensor)? };
            assert_eq!((back.shape(), back.is_read_only(), dev.stats().adopted), (&[3, 2][..], false, 24));
            let mut back = back.into_buffer()?;
            slow_add(dev, &mut back, 1, 100)?;
            assert_eq!(dev.download(&back)?, [12, 13, 14, 15, 16, 17]);
            drop(back);
            dev.synchronize()?;
            assert!(dev.stats().in_use <= before);
            let scalar = dev.to_dlpack(dev.upload(&[7u32])?, &[])?;
            let empty = dev.to_dlpack(dev.zeros::<u32>(0)?, &[4, 0])?;
            std::thread::spawn(move || drop((scalar, empty))).join().unwrap();
            Ok(())
        });
        pool.close().unwrap();
    }

    // A shared buffer cannot be written, so several tensors and this crate read it; the last owner frees it.
    1: fn a_part_of_a_shared_buffer_goes_out_read_only(gpus) {
        gpus.run(1, |dev| {
            let mut x = dev.upload(&[1u32, 2, 3, 4, 5, 6])?;
            slow_add(dev, &mut x, 10, 20_000)?;
            let (before, mut x) = (dev.stats().in_use, Arc::new(x));
            let (row, rest) = (dev.to_dlpack_part(&x, 2..4, &[1, 2])?, dev.to_dlpack_part(&x, 4.., &[2])?);
            assert!(row.flags().contains(DlpackFlags::READ_ONLY));
            if !gpus.is_cuda() {
                // SAFETY: two values; the export has waited for the kernel.
                assert_eq!(unsafe { row.tensor().cpu_slice::<u32>() }.unwrap(), [13, 14]);
            }
            assert!(Arc::get_mut(&mut x).is_none(), "nothing can write it");
            // SAFETY: nothing writes the tensor.
            let back = unsafe { dev.from_dlpack::<u32>(row)? };
            assert!(back.is_read_only());
            assert_eq!((dev.download(&back)?, dev.download(&*x)?), (vec![13, 14], vec![11, 12, 13, 14, 15, 16]));
            drop((x, back));
            dev.synchronize()?;
            assert_eq!(dev.stats().in_use, before, "`rest` keeps all of it");
            std::thread::spawn(move || drop(rest)).join().unwrap();
            dev.synchronize()?;
            let short = failure(dev.to_dlpack_part(&Arc::new(dev.zeros::<u32>(4)?), 1..3, &[3]).map(drop)).to_string();
            assert!(short.contains("2 elements in the shape [3]"), "{short}");
            Ok(())
        });
    }

    // Page-locked memory is a tensor of the CPU, which waits for the copies into it.
    1: fn page_locked_memory_goes_out(gpus) {
        let pool = gpus.pool(1);
        let host = pool.on_device(0).run(|dev| {
            let mut x = dev.upload(&[1u32, 2, 3, 4, 5, 6])?;
            slow_add(dev, &mut x, 10, 20_000)?;
            let mut host = dev.pinned(6)?;
            dev.download_pinned(&x, &mut host)?;
            Ok(host)
        });
        let tensor = host.unwrap().into_dlpack(&[3, 2]).unwrap();
        let described = tensor.validate().unwrap();
        assert_eq!((described.shape(), described.device().device_type), (&[3, 2][..], DLDevice::CPU.device_type));
        // SAFETY: six values; the export has waited for the copy.
        assert_eq!(unsafe { tensor.tensor().cpu_slice::<u32>() }.unwrap(), [11, 12, 13, 14, 15, 16]);
        std::thread::spawn(move || drop(tensor)).join().unwrap();
        let wrong = pool.on_device(0).run(|dev| dev.pinned::<u32>(6)).unwrap().into_dlpack(&[5]);
        let error = failure(wrong.map(drop));
        assert!(matches!(error, Error::InvalidArgument { op: "into_dlpack", .. }), "{error}");
        pool.close().unwrap();
    }

    /// A launch of a graph needs no borrow, so it would not be in order with the other library.
    1: fn memory_that_a_graph_names_does_not_go_out(gpus) {
        gpus.run(1, |dev| {
            let mut x = dev.zeros::<u32>(6)?;
            let (graph, ()) = dev.capture(|dev| dev.fill(&mut x, 7))?;
            let shared = Arc::new(x);
            let error = failure(dev.to_dlpack_part(&shared, 0..6, &[6]).map(drop));
            assert!(matches!(error, Error::InvalidArgument { op: "to_dlpack_part", .. }), "{error}");
            let x = Arc::into_inner(shared).expect("the only one");
            let error = failure(dev.to_dlpack(x, &[6]).map(drop));
            assert!(matches!(error, Error::InvalidArgument { op: "to_dlpack", .. }), "{error}");
            drop(graph);
            Ok(())
        });
    }

    1: fn exports_are_refused_by_shape(gpus) {
        gpus.run(1, |dev| {
            for shape in [&[][..], &[5], &[2, 4], &[usize::MAX, 2]] {
                let error = failure(dev.to_dlpack(dev.zeros::<f32>(6)?, shape).map(drop));
                assert!(matches!(error, Error::InvalidArgument { op: "to_dlpack", .. }), "{error}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_buffer_of_another_pool_is_not_exported() {
    let pools = [(); 2].map(|()| crate::support::Gpus::software().pool(1));
    let x = pools[0].on_device(0).run(|dev| dev.zeros::<f32>(4)).unwrap();
    let refused = pools[1].on_device(0).run(move |dev| dev.to_dlpack(x, &[4]).map(drop));
    assert!(matches!(failure(refused), Error::WrongPool { op: "to_dlpack", .. }));
}

/// A tensor of another library is used in place, and released after its last use.
#[test]
fn a_tensor_comes_in() {
    let owner = Arc::new(());
    let pool = crate::support::Gpus::software().run(1, |dev| {
        let foreign = tensor(&[1, 2, 3, 4, 5, 6], &[2, 3], &[3, 1], DlpackFlags::empty(), &owner);
        // SAFETY: nothing else uses it.
        let x = unsafe { dev.from_dlpack::<i32>(foreign)? };
        assert_eq!((x.shape(), dev.download(&dev.cast::<i64, _>(&x)?)?), (&[2, 3][..], vec![1, 2, 3, 4, 5, 6]));
        drop(x);
        // numpy makes arrays that are read-only: they are read, not written.
        let foreign = tensor(&[7, 8], &[2], &[1], DlpackFlags::READ_ONLY, &owner);
        // SAFETY: nothing else uses it.
        let x = unsafe { dev.from_dlpack::<i32>(foreign)? };
        assert!(x.is_read_only() && dev.download(&x)? == [7, 8]);
        let error = failure(x.into_buffer().map(drop));
        assert!(matches!(error, Error::InvalidArgument { op: "into_buffer", .. }), "{error}");
        Ok(())
    });
    pool.close().unwrap();
    assert!(released(&owner));
}

/// Each mistake is an error with a reason, and the tensor is released.
#[test]
fn tensors_that_do_not_fit_are_refused() {
    let owner = Arc::new(());
    let refused = |dev: &Device, tensor: Dlpack, text: &str| -> Result<()> {
        // SAFETY: it is refused.
        let error = failure(unsafe { dev.from_dlpack::<i32>(tensor) }.map(drop));
        assert!(matches!(error, Error::InvalidArgument { op: "from_dlpack", .. }), "{error:?}");
        assert!(error.to_string().contains(text) && released(&owner), "{error}");
        Ok(())
    };
    crate::support::Gpus::software().run(1, |dev| {
        let six = |shape: &[i64], strides: &[i64]| tensor(&[0; 6], shape, strides, DlpackFlags::empty(), &owner);
        refused(dev, six(&[3, 2], &[1, 3]), "contiguous")?;
        refused(dev, six(&[3], &[2]), "contiguous")?;
        let spoiled = |spoil: fn(&mut DLTensor)| {
            let raw = six(&[6], &[1]).into_raw();
            // SAFETY: a live tensor, which nothing else has.
            unsafe {
                spoil(&mut (*raw).dl_tensor);
                Dlpack::from_raw(raw).unwrap()
            }
        };
        refused(dev, spoiled(|tensor| tensor.device = DLDevice::cuda(0)), "device 0 is")?;
        refused(dev, spoiled(|tensor| tensor.dtype = DLDataType::F32), "dtype")?;
        refused(dev, spoiled(|tensor| tensor.data = std::ptr::null_mut()), "null")?;
        // SAFETY: the shape has one length.
        refused(dev, spoiled(|tensor| unsafe { *tensor.shape = -1 }), "")
    });
}
