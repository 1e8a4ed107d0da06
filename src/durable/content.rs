//! The bytes of a file, from any parts of memory.

/// Consecutive parts of memory.
pub struct Content<'a> {
    parts: Vec<&'a [u8]>,
    /// End of each part in the file.
    ends: Vec<usize>,
}

impl<'a> Content<'a> {
    /// The parts in order; empty ones are ignored.
    pub fn new(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let parts: Vec<&[u8]> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.len();
            Some(*end)
        });
        Self { ends: ends.collect(), parts }
    }

    /// Total number of bytes.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Fills `out` with the bytes from `start`; all of them must exist.
    ///
    /// Example: of `[b"abc", b"defg"]`, 3 bytes from 2 are `cde`.
    pub(super) fn copy(&self, start: usize, out: &mut [u8]) {
        let first = self.ends.partition_point(|&end| end <= start);
        let (mut at, mut written) = (start, 0);
        for (part, end) in self.parts[first..].iter().zip(&self.ends[first..]) {
            if written == out.len() {
                break;
            }
            let from = part.len() - (end - at);
            let bytes = (part.len() - from).min(out.len() - written);
            out[written..written + bytes].copy_from_slice(&part[from..from + bytes]);
            (at, written) = (at + bytes, written + bytes);
        }
        assert_eq!(
            written,
            out.len(),
            "content: {} bytes from {start} on are more than there are",
            out.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_range_has_the_bytes_of_the_parts_put_together(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..6),
            start in 0_usize..40,
            bytes in 0_usize..40,
        ) {
            let content = Content::new(parts.iter().map(Vec::as_slice));
            let all = parts.concat();
            prop_assert_eq!(content.len(), all.len());
            prop_assert_eq!(content.is_empty(), all.is_empty());
            let start = start.min(all.len());
            let mut out = vec![0; bytes.min(all.len() - start)];
            content.copy(start, &mut out);
            prop_assert_eq!(&out, &all[start..start + out.len()]);
        }
    }
}
