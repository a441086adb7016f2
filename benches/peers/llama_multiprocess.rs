//! The other side of `candle_decode`: candle's own tensor-parallel Llama, its example `llama_multiprocess`, in one
//! process for each GPU with sums by NCCL.
//!
//! From <https://github.com/huggingface/candle> (`candle-examples/examples/llama_multiprocess`), which is under MIT or
//! Apache-2.0, as this repository is. Changes:
//! * The attention is [`attention`](super::model::attention), as on our side, instead of `candle_flash_attn`, which
//!   takes very long to compile. It needs no copies of shared keys, so `repeat_kv` is gone.
//! * The interfaces are those of candle 0.11 and cudarc 0.19: NCCL works on candle's stream. f16 is gone.
//! * Waits for the file with NCCL's number look each millisecond, not each second. Events of cudarc are off, as in
//!   candle's example `llama2-c`. The next word is the most likely one, found on the device. Ranks are started by
//!   the bench.

#![allow(unsafe_code)]

use super::model::attention;
use anyhow::{Result, bail};
use candle_core::{
    CpuStorage, CustomOp1, D, DType, Device, IndexOp as _, Layout, Result as CandleResult, Shape, Tensor,
    cuda_backend::cudarc::nccl::safe::{Comm, Id, ReduceOp},
};
use candle_nn::{
    Embedding, Linear, Module as _, RmsNorm,
    var_builder::{Shard, ShardedSafeTensors, ShardedVarBuilder as VarBuilder},
};
use half::bf16;
use std::{
    path::Path,
    rc::Rc,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

struct TensorParallelColumnLinear {
    linear: Linear,
}

struct TensorParallelRowLinear {
    linear: Linear,
    all_reduce: AllReduce,
}

struct AllReduce {
    comm: Rc<Comm>,
}

// SAFETY: as candle's example has it; the process uses its communicator on one thread.
unsafe impl Sync for AllReduce {}
// SAFETY: as above.
unsafe impl Send for AllReduce {}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "allreduce"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> CandleResult<(CpuStorage, Shape)> {
        candle_core::bail!("AllReduce is never used on cpu")
    }

    fn cuda_fwd(&self, s: &candle_core::CudaStorage, l: &Layout) -> CandleResult<(candle_core::CudaStorage, Shape)> {
        let s_device = s.device.clone();
        let own = s.as_cuda_slice::<bf16>()?;
        match l.contiguous_offsets() {
            Some((0, len)) if len == own.len() => {}
            _ => candle_core::bail!("input has to be contiguous"),
        }
        // SAFETY: NCCL writes all of it.
        let mut dst = unsafe { s_device.alloc::<bf16>(l.shape().elem_count()) }?;
        self.comm.all_reduce(own, &mut dst, &ReduceOp::Sum).map_err(candle_core::Error::debug)?;
        Ok((candle_core::CudaStorage::wrap_cuda_slice(dst, s_device), l.shape().clone()))
    }
}

fn shard(dim: usize, rank: usize, world_size: usize) -> Shard {
    Shard { dim, rank, world_size }
}

impl TensorParallelColumnLinear {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.linear.forward(x)
    }

    fn load(vb: &VarBuilder<'_>, shape: (usize, usize), comm: &Comm) -> CandleResult<Self> {
        let weight = vb.get_with_hints(shape, "weight", shard(0, comm.rank(), comm.world_size()))?;
        Ok(Self { linear: Linear::new(weight, None) })
    }

    fn load_multi(vb: &VarBuilder<'_>, prefixes: [(&str, (usize, usize)); 3], comm: &Comm) -> CandleResult<Self> {
        let of = |(p, shape)| vb.pp(p).get_with_hints(shape, "weight", shard(0, comm.rank(), comm.world_size()));
        let weights: Vec<_> = prefixes.into_iter().map(of).collect::<CandleResult<Vec<_>>>()?;
        Ok(Self { linear: Linear::new(Tensor::cat(&weights, 0)?, None) })
    }
}

impl TensorParallelRowLinear {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        self.linear.forward(x)?.apply_op1_no_bwd(&self.all_reduce)
    }

    fn load(vb: &VarBuilder<'_>, shape: (usize, usize), comm: Rc<Comm>) -> CandleResult<Self> {
        let weight = vb.get_with_hints(shape, "weight", shard(1, comm.rank(), comm.world_size()))?;
        Ok(Self { linear: Linear::new(weight, None), all_reduce: AllReduce { comm } })
    }
}

/// By layer: keys and values.
type Rows = Arc<Mutex<Vec<Option<(Tensor, Tensor)>>>>;

#[derive(Clone)]
struct Cache {
    kvs: Rows,
    cos: Tensor,
    sin: Tensor,
}

impl Cache {
    fn new(dtype: DType, config: &super::Config, device: &Device) -> CandleResult<Self> {
        let n_elem = config.width / config.heads;
        let theta: Vec<_> = (0..n_elem).step_by(2).map(|i| 1f32 / 10_000f32.powf(i as f32 / n_elem as f32)).collect();
        let theta = Tensor::new(theta.as_slice(), device)?;
        let idx_theta = Tensor::arange(0, config.longest as u32, device)?
            .to_dtype(DType::F32)?
            .reshape((config.longest, 1))?
            .matmul(&theta.reshape((1, theta.elem_count()))?)?;
        let cos = idx_theta.cos()?.to_dtype(dtype)?;
        let sin = idx_theta.sin()?.to_dtype(dtype)?;
        Ok(Self { kvs: Arc::new(Mutex::new(vec![None; config.layers])), cos, sin })
    }
}

fn silu(xs: &Tensor) -> CandleResult<Tensor> {
    xs / (xs.neg()?.exp()? + 1.0)?
}

fn linear(size1: usize, size2: usize, vb: &VarBuilder<'_>) -> CandleResult<Linear> {
    Ok(Linear::new(vb.get((size2, size1), "weight")?, None))
}

struct CausalSelfAttention {
    qkv_proj: TensorParallelColumnLinear,
    o_proj: TensorParallelRowLinear,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    cache: Cache,
}

impl CausalSelfAttention {
    fn apply_rotary_emb(&self, x: &Tensor, index_pos: usize) -> CandleResult<Tensor> {
        let (_b_sz, _, seq_len, _hidden_size) = x.shape().dims4()?;
        let cos = self.cache.cos.narrow(0, index_pos, seq_len)?;
        let sin = self.cache.sin.narrow(0, index_pos, seq_len)?;
        candle_nn::rotary_emb::rope(x, &cos, &sin)
    }

    fn forward(&self, x: &Tensor, index_pos: usize, block_idx: usize) -> CandleResult<Tensor> {
        let (b_sz, seq_len, _) = x.shape().dims3()?;
        let qkv = self.qkv_proj.forward(x)?;
        let hidden_size = self.num_attention_heads * self.head_dim;
        let kv_size = self.num_key_value_heads * self.head_dim;
        let q = qkv.i((.., .., ..hidden_size))?;
        let k = qkv.i((.., .., hidden_size..hidden_size + kv_size))?;
        let v = qkv.i((.., .., hidden_size + kv_size..))?;
        let split = |x: Tensor, heads| x.reshape((b_sz, seq_len, heads, self.head_dim))?.transpose(1, 2)?.contiguous();
        let q = split(q, self.num_attention_heads)?;
        let k = split(k, self.num_key_value_heads)?;
        let mut v = split(v, self.num_key_value_heads)?;
        let q = self.apply_rotary_emb(&q, index_pos)?;
        let mut k = self.apply_rotary_emb(&k, index_pos)?;

        let mut cache = self.cache.kvs.lock().expect("one thread");
        if let Some((cache_k, cache_v)) = &cache[block_idx] {
            k = Tensor::cat(&[cache_k, &k], 2)?.contiguous()?;
            v = Tensor::cat(&[cache_v, &v], 2)?.contiguous()?;
        }
        cache[block_idx] = Some((k.clone(), v.clone()));

        let y = attention(&q.squeeze(0)?, &k.squeeze(0)?, &v.squeeze(0)?)?;
        let y = y.transpose(0, 1)?.reshape((b_sz, seq_len, hidden_size))?;
        self.o_proj.forward(&y)
    }

    fn load(vb: &VarBuilder<'_>, cache: &Cache, cfg: &super::Config, comm: &Rc<Comm>) -> CandleResult<Self> {
        let (width, kv) = (cfg.width, cfg.width / cfg.heads * cfg.kv_heads);
        let qkv = [("q_proj", (width, width)), ("k_proj", (kv, width)), ("v_proj", (kv, width))];
        Ok(Self {
            qkv_proj: TensorParallelColumnLinear::load_multi(vb, qkv, comm)?,
            o_proj: TensorParallelRowLinear::load(&vb.pp("o_proj"), (width, width), comm.clone())?,
            num_attention_heads: cfg.heads / comm.world_size(),
            num_key_value_heads: cfg.kv_heads / comm.world_size(),
            head_dim: cfg.width / cfg.heads,
            cache: cache.clone(),
        })
    }
}

struct Mlp {
    c_fc1: TensorParallelColumnLinear,
    c_fc2: TensorParallelColumnLinear,
    c_proj: TensorParallelRowLinear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let x = (silu(&self.c_fc1.forward(x)?)? * self.c_fc2.forward(x)?)?;
        self.c_proj.forward(&x)
    }

    fn load(vb: &VarBuilder<'_>, cfg: &super::Config, comm: &Rc<Comm>) -> CandleResult<Self> {
        Ok(Self {
            c_fc1: TensorParallelColumnLinear::load(&vb.pp("gate_proj"), (cfg.inner, cfg.width), comm)?,
            c_fc2: TensorParallelColumnLinear::load(&vb.pp("up_proj"), (cfg.inner, cfg.width), comm)?,
            c_proj: TensorParallelRowLinear::load(&vb.pp("down_proj"), (cfg.width, cfg.inner), comm.clone())?,
        })
    }
}

struct Block {
    rms_1: RmsNorm,
    attn: CausalSelfAttention,
    rms_2: RmsNorm,
    mlp: Mlp,
}

fn rms_norm(size: usize, eps: f64, vb: &VarBuilder<'_>) -> CandleResult<RmsNorm> {
    Ok(RmsNorm::new(vb.get_with_hints(size, "weight", shard(0, 0, 1))?, eps))
}

impl Block {
    fn forward(&self, x: &Tensor, index_pos: usize, block_idx: usize) -> CandleResult<Tensor> {
        let residual = x;
        let x = self.rms_1.forward(x)?;
        let x = (self.attn.forward(&x, index_pos, block_idx)? + residual)?;
        let residual = &x;
        self.mlp.forward(&self.rms_2.forward(&x)?)? + residual
    }

    fn load(vb: &VarBuilder<'_>, cache: &Cache, cfg: &super::Config, comm: &Rc<Comm>) -> CandleResult<Self> {
        Ok(Self {
            rms_1: rms_norm(cfg.width, 1e-5, &vb.pp("input_layernorm"))?,
            attn: CausalSelfAttention::load(&vb.pp("self_attn"), cache, cfg, comm)?,
            rms_2: rms_norm(cfg.width, 1e-5, &vb.pp("post_attention_layernorm"))?,
            mlp: Mlp::load(&vb.pp("mlp"), cfg, comm)?,
        })
    }
}

struct Llama {
    wte: Embedding,
    blocks: Vec<Block>,
    ln_f: RmsNorm,
    lm_head: Linear,
}

impl Llama {
    fn forward(&self, x: &Tensor, index_pos: usize) -> CandleResult<Tensor> {
        let (_b_sz, seq_len) = x.shape().dims2()?;
        let mut x = self.wte.forward(x)?;
        for (block_idx, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, index_pos, block_idx)?;
        }
        let x = self.ln_f.forward(&x)?;
        let x = x.i((.., seq_len - 1, ..))?;
        self.lm_head.forward(&x)?.to_dtype(DType::F32)
    }

    fn load(vb: &VarBuilder<'_>, cache: &Cache, cfg: &super::Config, comm: &Rc<Comm>) -> CandleResult<Self> {
        let embeddings = vb.pp("model.embed_tokens").get((cfg.words, cfg.width), "weight")?;
        let block = |i| Block::load(&vb.pp(format!("model.layers.{i}")), cache, cfg, comm);
        Ok(Self {
            wte: Embedding::new(embeddings, cfg.width),
            lm_head: linear(cfg.width, cfg.words, &vb.pp("lm_head"))?,
            ln_f: rms_norm(cfg.width, 1e-5, &vb.pp("model.norm"))?,
            blocks: (0..cfg.layers).map(block).collect::<CandleResult<Vec<_>>>()?,
        })
    }
}

/// One rank, from the start of its process on.
pub fn run(file: &Path, comm_file: &Path, rank: usize, num_shards: usize) -> Result<()> {
    let start = Instant::now();
    let id = if rank == 0 {
        let id = Id::new().map_err(|err| anyhow::anyhow!("{err:?}"))?;
        let tmp_file = comm_file.with_extension("tmp");
        std::fs::write(&tmp_file, id.internal().iter().map(|&i| i as u8).collect::<Vec<_>>())?;
        std::fs::rename(&tmp_file, comm_file)?;
        id
    } else {
        while !comm_file.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let data = std::fs::read(comm_file)?;
        let internal: Vec<_> = data.into_iter().map(|i| i as std::ffi::c_char).collect();
        Id::uninit(internal.try_into().map_err(|_| anyhow::anyhow!("a file of another length"))?)
    };
    let device = Device::new_cuda(rank)?;
    let cuda = device.as_cuda_device()?;
    // SAFETY: all work of this process is on candle's stream.
    unsafe { cuda.disable_event_tracking() };
    let comm = match Comm::from_rank(cuda.cuda_stream(), rank, num_shards, id) {
        Ok(comm) => Rc::new(comm),
        Err(err) => bail!("nccl error {:?}", err.0),
    };
    super::note("NCCL", start);
    let (dtype, config) = (DType::BF16, &super::LARGE);
    let cache = Cache::new(dtype, config, &device)?;
    // SAFETY: only the bench knows the file.
    let vb = unsafe { ShardedSafeTensors::var_builder(&[file], dtype, &device)? };
    let llama = Llama::load(&vb, &cache, config, &comm)?;
    device.synchronize()?;
    super::note("weights", start);
    let mut index_pos = 0;
    super::decode(rank == 0, &config.prompt(), |words| {
        let input = Tensor::new(words, &device)?.unsqueeze(0)?;
        let logits = llama.forward(&input, index_pos)?.squeeze(0)?;
        index_pos += words.len();
        Ok(logits.argmax(D::Minus1)?.to_scalar::<u32>()?)
    })
}
