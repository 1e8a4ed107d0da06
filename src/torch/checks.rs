//! Shared preparation of all ops: checks of arguments, the choice of the device, and the types of elements.

use super::tensor::{Dtype, Tensor};
use crate::ensure;
use crate::error::{Error, Result};

/// Evaluates the call into `on_cuda`, in builds with CUDA.
macro_rules! on_cuda {
    ($function:ident($($argument:expr),*)) => {{
        #[cfg(feature = "cuda")]
        let result = $crate::torch::on_cuda::$function($($argument),*);
        #[cfg(not(feature = "cuda"))]
        let result = {
            $(let _ = &$argument;)*
            Err($crate::Error::Unavailable { what: "CUDA", problem: "this build of evermoe has no CUDA".into() })
        };
        result
    }};
}
pub(super) use on_cuda;

/// Evaluates an expression with `$T` bound to the Rust type of a checked dtype.
macro_rules! with_dtype {
    ($dtype:expr, $T:ident in [$($variant:ident = $type:ty),*] => $body:expr) => {
        match $dtype {
            $($crate::torch::tensor::Dtype::$variant => { type $T = $type; $body })*
            other => Err($crate::Error::invalid(format!("no kernel for {other}"))),
        }
    };
}
pub(super) use with_dtype;

/// Evaluates an expression with `$I` bound to the integer type of a checked tensor of ids, row ids or positions.
macro_rules! with_ids {
    ($tensor:expr, $I:ident => $body:expr) => {
        $crate::torch::checks::with_dtype!($tensor.dtype(), $I in [Int32 = i32, Int64 = i64] => $body)
    };
}
pub(super) use with_ids;

/// Evaluates an expression with `$F` bound to the float type of a checked tensor of rows or weights.
macro_rules! with_rows {
    ($tensor:expr, $F:ident => $body:expr) => {
        $crate::torch::checks::with_dtype!(
            $tensor.dtype(), $F in [Float32 = f32, Bfloat16 = half::bf16, Float16 = half::f16] => $body
        )
    };
}
pub(super) use with_rows;

pub(super) fn shape<const DIM: usize>(name: &str, expected: &str, tensor: &Tensor) -> Result<[i64; DIM]> {
    let sizes = tensor.sizes();
    sizes.try_into().map_err(|_| Error::invalid(format!("{name}: expected shape {expected}, got {sizes:?}")))
}

pub(super) fn check_ids(name: &str, tensor: &Tensor) -> Result<()> {
    let dtype = tensor.dtype();
    ensure!(matches!(dtype, Dtype::Int32 | Dtype::Int64), "{name}: expected int32 or int64, got {dtype}");
    Ok(())
}

pub(super) fn check_int64(name: &str, tensor: &Tensor) -> Result<()> {
    ensure!(tensor.dtype() == Dtype::Int64, "{name}: expected int64, got {}", tensor.dtype());
    Ok(())
}

pub(super) fn check_rows(name: &str, tensor: &Tensor) -> Result<()> {
    let dtype = tensor.dtype();
    ensure!(
        matches!(dtype, Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16),
        "{name}: expected float32, bfloat16 or float16, got {dtype}"
    );
    Ok(())
}

pub(super) fn check_device(name: &str, tensor: &Tensor, other: &Tensor) -> Result<()> {
    let (own, expected) = (tensor.device(), other.device());
    ensure!(
        own == expected,
        "{name}: expected a tensor on {expected} like the other arguments, got one on {own}"
    );
    Ok(())
}

pub(super) fn check_weights(weights: &Tensor, positions: &Tensor, rows: &Tensor) -> Result<()> {
    let (sizes, expected) = (weights.sizes(), positions.sizes());
    ensure!(sizes == expected, "weights: expected the shape of positions, {expected:?}, got {sizes:?}");
    let (dtype, row) = (weights.dtype(), rows.dtype());
    ensure!(
        dtype == Dtype::Float32 || dtype == row,
        "weights: expected float32 or the rows' {row}, got {dtype}"
    );
    check_device("weights", weights, rows)
}

pub(super) fn check_out(name: &str, out: &Tensor, sizes: [i64; 2], like: &Tensor) -> Result<()> {
    ensure!(
        out.sizes() == sizes && out.dtype() == like.dtype(),
        "{name}: expected {} of shape {sizes:?}, got {} of shape {:?}",
        like.dtype(),
        out.dtype(),
        out.sizes()
    );
    ensure!(out.is_contiguous(), "{name}: expected a contiguous tensor");
    check_device(name, out, like)
}

pub(super) fn check_disjoint(out_name: &str, out: &Tensor, inputs: &[(&str, &Tensor)]) -> Result<()> {
    let written = out.address_range();
    for (name, input) in inputs {
        let read = input.address_range();
        let apart =
            read.is_empty() || written.is_empty() || read.end <= written.start || written.end <= read.start;
        ensure!(apart, "{out_name}: expected memory of its own, got a tensor that overlaps {name}");
    }
    Ok(())
}
