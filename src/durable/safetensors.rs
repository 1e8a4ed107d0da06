//! The header of a safetensors file, by the crate `safetensors`.

use crate::error::{Error, Result};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::HashMap;

const ALIGNMENT: usize = 8;
/// Maximum size of a header; readers refuse longer ones.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// A tensor of a file.
pub struct Piece {
    /// Its name.
    pub name: String,
    /// Its type in safetensors' notation: `F32`, `BF16`, `I64` …
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes.
    pub bytes: usize,
}

/// Returns the beginning of a file with these tensors, and their order in it: by type, largest first, then by name.
///
/// # Errors
/// [`Error::Invalid`] for unknown types, sizes that do not fit the shapes, duplicate names, and headers of more than
/// 100 MB.
pub fn header(pieces: &[Piece], metadata: Option<HashMap<String, String>>) -> Result<(Vec<u8>, Vec<usize>)> {
    let invalid = |error: &dyn std::fmt::Display| Error::invalid(format!("tensors: {error}"));
    let mut dtypes = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let dtype: Dtype =
            serde_json::from_value(piece.dtype.clone().into()).map_err(|error| invalid(&error))?;
        dtypes.push(dtype);
    }
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by(|&a, &b| dtypes[b].cmp(&dtypes[a]).then_with(|| pieces[a].name.cmp(&pieces[b].name)));
    let mut end = 0;
    let infos = order.iter().map(|&at| {
        let (piece, start) = (&pieces[at], end);
        end += piece.bytes;
        let info = TensorInfo { dtype: dtypes[at], shape: piece.shape.clone(), data_offsets: (start, end) };
        (piece.name.clone(), info)
    });
    let infos: Vec<_> = infos.collect();
    let twice = order.windows(2).find(|pair| pieces[pair[0]].name == pieces[pair[1]].name);
    if let Some(pair) = twice {
        return Err(invalid(&format!("{:?} occurs twice", pieces[pair[0]].name)));
    }
    let written = Metadata::new(metadata, infos).map_err(|error| invalid(&error))?;
    let mut text = serde_json::to_vec(&written).map_err(|error| invalid(&error))?;
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    if text.len() > MAX_HEADER_BYTES {
        return Err(invalid(&format!(
            "their names and shapes take {} bytes, and a file may have {MAX_HEADER_BYTES}",
            text.len()
        )));
    }
    let mut head = (text.len() as u64).to_le_bytes().to_vec();
    head.append(&mut text);
    Ok((head, order))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{SafeTensors, TensorView, serialize};

    fn piece(name: &str, dtype: &str, shape: &[usize], bytes: usize) -> Piece {
        Piece { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes }
    }

    #[test]
    fn a_file_is_what_the_crate_itself_writes() {
        let data: Vec<Vec<u8>> = vec![vec![1; 6], vec![2; 8], vec![3; 24], vec![], vec![4; 8]];
        let pieces = [
            piece("b", "BF16", &[3], 6),
            piece("scalar", "I64", &[], 8),
            piece("a", "F32", &[2, 3], 24),
            piece("none", "F32", &[0, 4], 0),
            piece("a/b", "F32", &[2], 8),
        ];
        let dtypes = [Dtype::BF16, Dtype::I64, Dtype::F32, Dtype::F32, Dtype::F32];
        let metadata = Some(HashMap::from([("format".to_owned(), "pt".to_owned())]));
        let (mut file, order) = header(&pieces, metadata.clone()).unwrap();
        order.iter().for_each(|&at| file.extend(&data[at]));
        let views = pieces.iter().zip(&data).zip(dtypes).map(|((piece, data), dtype)| {
            (piece.name.clone(), TensorView::new(dtype, piece.shape.clone(), data).unwrap())
        });
        assert_eq!(file, serialize(views, metadata).unwrap());
        assert_eq!(SafeTensors::deserialize(&file).unwrap().tensor("a").unwrap().data(), data[2]);
    }

    #[test]
    fn what_cannot_be_written_is_said() {
        for (pieces, expected) in [
            (vec![piece("a", "F31", &[1], 4)], "F31"),
            (vec![piece("a", "F32", &[2], 4)], "tensors: "),
            (vec![piece("a", "F32", &[1], 4), piece("a", "F32", &[1], 4)], "\"a\" occurs twice"),
        ] {
            let message = header(&pieces, None).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
