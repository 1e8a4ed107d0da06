//! The ops between rows and their 8-bit form: checks, and the calls to the CPU's or the GPU's arithmetic.

use super::checks::{check_device, check_rows, on_cuda, shape, with_rows};
use super::library::TorchPool;
use super::tensor::{Device, Dtype, Tensor};
use crate::cpu;
use crate::ensure;
use crate::error::Result;

/// Alignment of 8-bit rows, so that their scales can be read.
const ALIGNMENT: usize = 16;

pub(super) fn quantize_rows(rows: Tensor) -> Result<Tensor> {
    check_rows("rows", &rows)?;
    let [num_rows, width] = shape("rows", "[N, H]", &rows)?;
    let rows = rows.contiguous()?;
    let row_bytes = cpu::fp8_row_bytes(width as usize) as i64;
    let mut out = Tensor::empty(&[num_rows, row_bytes], Dtype::Uint8, &rows)?;
    if rows.device() != Device::Cpu {
        on_cuda!(quantize_rows(&rows, &mut out))?;
        return Ok(out);
    }
    with_rows!(rows, F => {
        cpu::quantize_rows::<F>(rows.slice()?, width as usize, out.slice_mut()?, &TorchPool);
        Ok(())
    })?;
    Ok(out)
}

pub(super) fn dequantize_rows(rows: Tensor, like: Tensor) -> Result<Tensor> {
    check_rows("like", &like)?;
    let [_, width] = shape("like", "[any, H]", &like)?;
    let [num_rows, row_bytes] = shape("rows", "[N, bytes]", &rows)?;
    ensure!(rows.dtype() == Dtype::Uint8, "rows: expected uint8, got {}", rows.dtype());
    let expected = cpu::fp8_row_bytes(width as usize) as i64;
    ensure!(row_bytes == expected, "rows: expected {expected} bytes for {width} columns, got {row_bytes}");
    check_device("rows", &rows, &like)?;
    let rows = rows.contiguous()?;
    ensure!(
        (rows.address() as usize).is_multiple_of(ALIGNMENT),
        "rows: expected an address that {ALIGNMENT} divides; use clone()"
    );
    let mut out = Tensor::empty(&[num_rows, width], like.dtype(), &rows)?;
    if rows.device() != Device::Cpu {
        on_cuda!(dequantize_rows(&rows, &mut out))?;
        return Ok(out);
    }
    with_rows!(out, F => {
        cpu::dequantize_rows::<F>(rows.slice()?, width as usize, out.slice_mut()?, &TorchPool);
        Ok(())
    })?;
    Ok(out)
}
