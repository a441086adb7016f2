//! [`Checkpoint`]: named tensors and texts in one file, in the format of the `safetensors` crate.
//!
//! Users make one of any model's downloads. Invariant: `load` reads everything that `save` accepts.

mod file;
mod parts;

pub use parts::Cut;
pub(crate) use parts::named;

use crate::runtime::{ErrorInternals, OpSite};
use gpu_pool::{DType, Element, Error, Result};
use safetensors::{
    SafeTensors,
    tensor::{Dtype, Metadata, TensorInfo},
};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::{cmp::Reverse, fs, ops::Range, path::Path, sync::Arc};

/// The format's own key beside the names of tensors.
const NOTES: &str = "__metadata__";
/// The format's limit for names, shapes and notes, in bytes.
const MOST_HEADER: usize = 100_000_000;

/// Tensors and texts with names, on the host: the state from which a training run goes on. The file is in the format
/// [safetensors](https://huggingface.co/docs/safetensors), which other programs read, too
/// (`safetensors.torch.load_file` of Python), and which runs no code when it is read.
///
/// The page "Checkpoints" of the guide has an example.
#[derive(Clone, Default)]
pub struct Checkpoint {
    file: Arc<Vec<u8>>,
    tensors: BTreeMap<String, Tensor>,
    notes: HashMap<String, String>,
}

#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Data,
}

#[derive(Clone)]
enum Data {
    Own(Vec<u8>),
    InFile(Range<usize>),
}

impl Checkpoint {
    /// Without contents.
    pub fn new() -> Self {
        Checkpoint::default()
    }

    /// Puts a tensor in, row by row; one of this name is replaced.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the shape has another number of elements, and for the name `__metadata__`, which
    /// the format has for [`note`](Self::note)s.
    #[track_caller]
    pub fn insert<T: Element>(&mut self, name: &str, shape: &[usize], x: &[T]) -> Result<()> {
        invalid_if!(name == NOTES, "Checkpoint::insert", "the format has `__metadata__` for notes");
        let elements = shape.iter().try_fold(1usize, |len, side| len.checked_mul(*side));
        invalid_if!(elements != Some(x.len()), "Checkpoint::insert", "`{name}`: {} elements are no {shape:?}", x.len());
        let data = Data::Own(bytemuck::cast_slice(x).to_vec());
        self.tensors.insert(name.to_owned(), Tensor { dtype: dtype_of(T::DTYPE), shape: shape.into(), data });
        Ok(())
    }

    /// A tensor's elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such tensor, or it has another type.
    #[track_caller]
    pub fn tensor<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let tensor = self.get("Checkpoint::tensor", name)?;
        let (dtype, wanted) = (tensor.dtype, T::DTYPE);
        invalid_if!(dtype != dtype_of(wanted), "Checkpoint::tensor", "`{name}` is of {dtype:?}, not of {wanted:?}");
        let bytes = self.bytes(tensor);
        let mut x = vec![T::zeroed(); bytes.len() / size_of::<T>()];
        bytemuck::cast_slice_mut(&mut x).copy_from_slice(bytes);
        Ok(x)
    }

    /// A tensor's shape.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such tensor.
    #[track_caller]
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.get("Checkpoint::shape", name)?.shape)
    }

    /// The names of all tensors, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Notes a text; one of this name is replaced.
    pub fn note(&mut self, name: &str, text: impl ToString) {
        self.notes.insert(name.to_owned(), text.to_string());
    }

    /// A noted text.
    pub fn noted(&self, name: &str) -> Option<&str> {
        self.notes.get(name).map(String::as_str)
    }

    /// Writes a file, first under a random name in the same folder; brings it to the disk, and renames it. So `path` is
    /// the old file or the new one, also if the process or the machine stops meanwhile, and while others save or read
    /// it. If several save at the same time, the last one to end wins.
    ///
    /// It keeps the mode of an old file. If `path` is a symbolic link, the file that it leads to is replaced, and the
    /// link stays. Temporary files (`.gpu-pool-..part`) that dead processes have left in the folder are removed.
    ///
    /// # Errors
    /// [`Error::Custom`] with the operating system's [`io::Error`] within a text that names the file; also for a
    /// folder, a device, and a link of another user. [`Error::InvalidArgument`] when names, shapes and notes have more
    /// than the 100 MB that the format allows.
    #[track_caller]
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let _here = OpSite::here("Checkpoint::save");
        let path = path.as_ref();
        let refused = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        // The order that the format's own programs write: no tensor begins at an odd address.
        let mut all: Vec<_> = self.tensors.iter().collect();
        all.sort_by_key(|(_, tensor)| Reverse(tensor.dtype));
        let mut end = 0;
        let mut info = |(name, tensor): &(&String, &Tensor)| {
            let start = end;
            end += self.bytes(tensor).len();
            let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
            (name.to_string(), TensorInfo { dtype, shape, data_offsets: (start, end) })
        };
        // With no tensors and empty notes, safetensors 0.8 would write no valid JSON.
        let notes = (!self.notes.is_empty()).then(|| self.notes.clone());
        let header = Metadata::new(notes, all.iter().map(&mut info).collect());
        let header = header.map_err(|error| Error::invalid("Checkpoint::save", refused(&error)))?;
        let mut header = serde_json::to_vec(&header).expect("plain data with text for keys");
        header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
        let (len, most) = (header.len(), MOST_HEADER);
        let why = format!("names, shapes and notes have {len} bytes, more than {most}");
        invalid_if!(len > most, "Checkpoint::save", "{}", refused(&why));
        let written = file::replace(path, |to| {
            to.write_all(&(header.len() as u64).to_le_bytes())?;
            to.write_all(&header)?;
            all.iter().try_for_each(|(_, tensor)| to.write_all(self.bytes(tensor)))
        });
        written.map_err(|error| failed(path, &error))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Custom`] when it cannot be read; [`Error::InvalidArgument`] when it is not complete, or no safetensors
    /// file. Both name the file.
    #[track_caller]
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let _here = OpSite::here("Checkpoint::load");
        let path = path.as_ref();
        let file = fs::read(path).map_err(|error| failed(path, &error))?;
        let (header, metadata) = SafeTensors::read_metadata(&file).map_err(|error| {
            let why = format_args!("{}: truncated, or no checkpoint: {error}", path.display());
            Error::invalid("Checkpoint::load", why)
        })?;
        let start = size_of::<u64>() + header;
        let tensor = |info: &TensorInfo| {
            let (from, to) = info.data_offsets;
            Tensor { dtype: info.dtype, shape: info.shape.clone(), data: Data::InFile(start + from..start + to) }
        };
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, tensor(info))).collect();
        let notes = metadata.metadata().clone().unwrap_or_default();
        Ok(Checkpoint { file: file.into(), tensors, notes })
    }

    #[track_caller]
    fn get(&self, op: &'static str, name: &str) -> Result<&Tensor> {
        match self.tensors.get(name) {
            Some(tensor) => Ok(tensor),
            None => Err(Error::invalid(op, format_args!("there is no tensor `{name}`"))),
        }
    }

    fn bytes<'a>(&'a self, tensor: &'a Tensor) -> &'a [u8] {
        match &tensor.data {
            Data::Own(bytes) => bytes,
            Data::InFile(range) => &self.file[range.clone()],
        }
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tensors = self.tensors.iter().map(|(name, tensor)| (name, (tensor.dtype, &tensor.shape)));
        f.debug_map().entries(tensors).finish()
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::custom(io::Error::new(error.kind(), format!("checkpoint {}: {error}", path.display())))
}

fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I8 => Dtype::I8,
        DType::U8 => Dtype::U8,
        DType::I32 => Dtype::I32,
        DType::U32 => Dtype::U32,
        DType::I64 => Dtype::I64,
        DType::U64 => Dtype::U64,
        other => unreachable!("{other:?}: the crates of one version belong together"),
    }
}
