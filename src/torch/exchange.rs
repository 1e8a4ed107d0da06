//! The ops for the exchange between ranks: `split_tokens`, `regroup` and `regroup_out`.

use super::checks::{check_device, check_disjoint, check_int64, check_out, on_cuda, shape};
use super::library::TorchPool;
use super::tensor::{Device, Dtype, Tensor};
use crate::error::Result;
use crate::{cpu, dispatch, ensure};

pub(super) fn split_tokens(counts: Tensor, replicas: Tensor, rank: i64) -> Result<(Tensor, Tensor)> {
    let [experts, ranks] = shape("counts", "[E, R]", &counts)?;
    check_int64("counts", &counts)?;
    check_int64("replicas", &replicas)?;
    ensure!(
        replicas.sizes() == [ranks, experts],
        "replicas: expected shape [{ranks}, {experts}] as counts is [{experts}, {ranks}], got {:?}",
        replicas.sizes()
    );
    check_device("replicas", &replicas, &counts)?;
    ensure!((0..ranks).contains(&rank), "rank: expected 0 or more and below {ranks}, got {rank}");
    let (counts, replicas) = (counts.contiguous()?, replicas.contiguous()?);
    let mut send = Tensor::empty(&[experts, ranks], Dtype::Int64, &counts)?;
    let mut receive = Tensor::empty(&[ranks, experts], Dtype::Int64, &counts)?;
    let [experts, ranks, rank] = [experts, ranks, rank].map(|number| number as usize);
    if counts.device() != Device::Cpu {
        on_cuda!(split_tokens(&counts, &replicas, rank, &mut send, &mut receive))?;
        return Ok((send, receive));
    }
    let even = dispatch::Policy::Even;
    let split = dispatch::split_tokens(counts.slice()?, replicas.slice()?, experts, ranks, rank, even)?;
    send.slice_mut()?.copy_from_slice(&split.send);
    receive.slice_mut()?.copy_from_slice(&split.receive);
    Ok((send, receive))
}

pub(super) fn regroup(rows: Tensor, counts: Tensor, inverse: bool) -> Result<Tensor> {
    let mut out = Tensor::empty(&shape::<2>("rows", "[N, H]", &rows)?, rows.dtype(), &rows)?;
    regroup_into(rows, counts, inverse, &mut out)?;
    Ok(out)
}

pub(super) fn regroup_out(rows: Tensor, counts: Tensor, inverse: bool, mut out: Tensor) -> Result<()> {
    check_out("out", &out, shape("rows", "[N, H]", &rows)?, &rows)?;
    out.bump_version()?;
    regroup_into(rows, counts, inverse, &mut out)
}

fn regroup_into(rows: Tensor, counts: Tensor, inverse: bool, out: &mut Tensor) -> Result<()> {
    let [num_rows, width] = shape("rows", "[N, H]", &rows)?;
    let [_, experts] = shape("counts", "[R, e]", &counts)?;
    check_int64("counts", &counts)?;
    check_device("counts", &counts, &rows)?;
    let row_bytes = width as usize * rows.dtype().bytes();
    ensure!(row_bytes.is_multiple_of(2), "rows: expected an even number of bytes each, got {row_bytes}");
    let (rows, counts) = (rows.contiguous()?, counts.contiguous()?);
    check_disjoint("out", out, &[("rows", &rows), ("counts", &counts)])?;
    if rows.device() != Device::Cpu {
        return on_cuda!(regroup(&rows, &counts, inverse, out));
    }
    let (counts, experts, num_rows) = (counts.slice()?, experts as usize, num_rows as usize);
    cpu::regroup(rows.bytes()?, counts, experts, num_rows, inverse, out.bytes_mut()?, &TorchPool)
}
