//! The ops `expert_histogram` and `expert_histograms`: checks, and the calls to the CPU's or the GPU's counts.

use super::checks::{check_device, check_ids, on_cuda, with_dtype};
use super::library::TorchPool;
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu;
use crate::ensure;
use crate::error::{Error, Result};

/// The table of counts must stay small.
const MAX_EXPERTS: i64 = 1 << 20;

pub(super) fn expert_histogram(ids: Tensor, num_experts: i64) -> Result<Tensor> {
    check_ids("ids", &ids)?;
    check_experts(num_experts)?;
    let layers = [ids.contiguous()?];
    let counts = Tensor::empty(&[num_experts], Dtype::Int64, &layers[0])?;
    count(&layers, num_experts as usize, counts, |_, error| error)
}

pub(super) fn expert_histograms(ids: Vec<Tensor>, num_experts: i64) -> Result<Tensor> {
    check_experts(num_experts)?;
    ensure!(!ids.is_empty(), "ids: expected the ids of one layer or more, got an empty list");
    for (layer, each) in ids.iter().enumerate() {
        check_ids("ids", each)
            .and_then(|()| check_device("ids", each, &ids[0]))
            .map_err(|error| at_layer(layer, error))?;
    }
    let layers = ids.into_iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
    let counts = Tensor::empty(&[layers.len() as i64, num_experts], Dtype::Int64, &layers[0])?;
    count(&layers, num_experts as usize, counts, at_layer)
}

fn check_experts(num_experts: i64) -> Result<()> {
    ensure!(
        (1..=MAX_EXPERTS).contains(&num_experts),
        "num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}"
    );
    Ok(())
}

fn at_layer(layer: usize, error: Error) -> Error {
    error.within(&format!("layer {layer}"))
}

/// Fills `counts`, a row for each layer; `name` identifies the layer in errors.
fn count(
    layers: &[Tensor],
    num_experts: usize,
    mut counts: Tensor,
    name: fn(usize, Error) -> Error,
) -> Result<Tensor> {
    if counts.device() != Device::Cpu {
        on_cuda!(histograms(layers, num_experts, &mut counts))?;
        return Ok(counts);
    }
    let rows = counts.slice_mut()?.chunks_exact_mut(num_experts);
    for (layer, (ids, row)) in layers.iter().zip(rows).enumerate() {
        with_dtype!(ids.dtype(), I in [Int32 = i32, Int64 = i64] => cpu::histogram::<I>(ids.slice()?, row, &TorchPool))
            .map_err(|error| name(layer, error))?;
    }
    Ok(counts)
}
