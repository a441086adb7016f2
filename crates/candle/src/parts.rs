//! [`Parts`]: where layers of which each device has a part get their weights. A part is read from a memory-mapped file
//! without the rest, or initialised for training; all parts together are saved as one file.

use crate::collective::{all_gather, broadcast};
use crate::device::with_token;
use crate::{Error, Result};
use candle_core::{DType, Device as Candle, Shape, Tensor, safetensors::MmapedSafetensors};
use candle_nn::{
    Init, VarMap,
    var_builder::{Backend, VarBuilderArgs},
};
use gpu_pool::Device;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::{borrow::Cow, ops::Range, path::Path};

/// The part of a weight that a device has, as the hint of [`PartBuilder`]. The default is all of it.
#[derive(Clone, Debug, Default)]
pub struct Part {
    /// The dimension that is cut, this device's range of it, and its whole length. None: the device has all.
    pub cut: Option<(usize, Range<usize>, usize)>,
    /// The first value, for weights that are trained from the start.
    pub init: Init,
}

impl Part {
    /// The part of dimension `dim` with `len` elements that belongs to this device: whole units of `unit` elements, as
    /// even as they can be. If there are fewer units than devices, the last devices have none.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # use gpu_pool_candle::Part;
    /// let pool = GpuPool::builder().host(3).build()?;
    /// let parts = pool.run(|dev, _| Ok(Part::of(dev, 0, 10, 2).cut.unwrap().1))?;
    /// assert_eq!(parts, [0..4, 4..8, 8..10]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Panics
    /// If `unit` does not divide `len`.
    pub fn of(dev: &Device, dim: usize, len: usize, unit: usize) -> Self {
        assert!(unit > 0 && len.is_multiple_of(unit), "{len} elements are no whole number of units of {unit}");
        let (units, rank, count) = (len / unit, dev.rank(), dev.count());
        let start = |rank: usize| (rank * (units / count) + rank.min(units % count)) * unit;
        Part { cut: Some((dim, start(rank)..start(rank + 1), len)), init: Init::default() }
    }

    /// The same part with another first value.
    #[must_use]
    pub fn init(self, init: Init) -> Self {
        Part { init, ..self }
    }
}

/// A [`VarBuilder`](candle_nn::VarBuilder) of parts: the same prefixes (`pp`), and a [`Part`] as its hint.
pub type PartBuilder = VarBuilderArgs<'static, Parts>;

/// The weights of a model of which each device has a part.
#[derive(Clone)]
pub struct Parts {
    source: Source,
    cuts: Arc<Mutex<BTreeMap<String, Part>>>,
}

#[derive(Clone)]
enum Source {
    Mapped(Arc<MmapedSafetensors>),
    Trained(VarMap),
}

debug_as!(Parts, |self| ..);

impl Parts {
    /// Weights of safetensors files, mapped into memory: a device reads its parts only. One mapping serves all devices.
    ///
    /// # Errors
    /// Candle's, if a file cannot be read.
    ///
    /// # Safety
    /// The files do not change while they are mapped.
    pub unsafe fn mapped(files: &[impl AsRef<Path>]) -> Result<Self> {
        // SAFETY: the caller's promise.
        let source = Source::Mapped(Arc::new(unsafe { MmapedSafetensors::multi(files)? }));
        Ok(Parts { source, cuts: Arc::default() })
    }

    /// Variables of this device, made and initialised when a layer asks for them.
    pub fn trained(variables: &VarMap) -> Self {
        Parts { source: Source::Trained(variables.clone()), cuts: Arc::default() }
    }

    /// The builder that layers take.
    pub fn builder(&self, dtype: DType, device: &Candle) -> PartBuilder {
        VarBuilderArgs::new_with_args(self.clone(), dtype, device)
    }

    /// Puts the parts of all devices together, and writes whole weights to one safetensors file on the device with rank
    /// 0. It can be read by candle, and by [`mapped`](Self::mapped) on any number of devices. All devices call it, in
    /// [`enter`](crate::enter).
    ///
    /// # Errors
    /// [`Error::Invalid`] for weights of a file, which do not change; those of the collective and of the file.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let Source::Trained(variables) = &self.source else {
            return Err(Error::invalid("save", "these weights come from a file"));
        };
        let cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut whole = HashMap::new();
        for (name, part) in cuts {
            let var = variables.data().lock().unwrap_or_else(PoisonError::into_inner)[&name].clone();
            let mut all = var.as_detached_tensor();
            if let Some((dim, ..)) = part.cut {
                all = all_gather(&all, dim)?;
            }
            if with_token("save", |dev| Ok(dev.rank()))? == 0 {
                whole.insert(name, all.to_device(&Candle::Cpu)?);
            }
        }
        if !whole.is_empty() {
            candle_core::safetensors::save(&whole, path)?;
        }
        Ok(())
    }
}

impl Backend for Parts {
    type Hints = Part;

    fn get(&self, own: Shape, name: &str, part: Part, dtype: DType, device: &Candle) -> candle_core::Result<Tensor> {
        let tensor = match &self.source {
            Source::Trained(variables) => {
                let fresh = !self.contains_tensor(name);
                let tensor = variables.get(own, name, part.init, dtype, device)?;
                // Whole weights are the same on all devices, also with a random first value.
                if fresh && part.cut.is_none() {
                    let var = variables.data().lock().unwrap_or_else(PoisonError::into_inner)[name].clone();
                    var.set(&broadcast(&tensor, 0)?)?;
                }
                tensor
            }
            Source::Mapped(files) => {
                let view = files.get(name)?;
                let (mut dims, of) = (view.shape().to_vec(), view.dtype().try_into()?);
                let tensor = match &part.cut {
                    None => Tensor::from_raw_buffer(view.data(), of, &dims, device)?,
                    Some((dim, range, len)) if dims.get(*dim) == Some(len) => {
                        let bytes = rows(view.data(), &dims, *dim, range);
                        dims[*dim] = range.len();
                        Tensor::from_raw_buffer(&bytes, of, &dims, device)?
                    }
                    Some((dim, _, len)) => {
                        candle_core::bail!("{name} has a shape of {dims:?}; {len} were expected in dimension {dim}")
                    }
                };
                if *tensor.shape() != own {
                    candle_core::bail!("the part of {name} has a shape of {:?}, not {own:?}", tensor.shape());
                }
                return tensor.to_dtype(dtype);
            }
        };
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_string(), part);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Candle) -> candle_core::Result<Tensor> {
        match &self.source {
            Source::Mapped(files) => files.load(name, device)?.to_dtype(dtype),
            Source::Trained(_) => candle_core::bail!("{name}: a weight that is trained needs a shape"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        match &self.source {
            Source::Mapped(files) => files.get(name).is_ok(),
            Source::Trained(variables) => {
                variables.data().lock().unwrap_or_else(PoisonError::into_inner).contains_key(name)
            }
        }
    }
}

/// The bytes of a range of one dimension, row by row: a copy, unless they stand in a row.
fn rows<'a>(all: &'a [u8], dims: &[usize], dim: usize, range: &Range<usize>) -> Cow<'a, [u8]> {
    let outer: usize = dims[..dim].iter().product();
    let row = all.len() / outer.max(1);
    let each = row / dims[dim].max(1);
    let own = range.start * each..range.end * each;
    if row == 0 || outer == 1 {
        return Cow::Borrowed(&all[if row == 0 { 0..0 } else { own }]);
    }
    let mut bytes = Vec::with_capacity(outer * own.len());
    all.chunks_exact(row).for_each(|row| bytes.extend_from_slice(&row[own.clone()]));
    Cow::Owned(bytes)
}
