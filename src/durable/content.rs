//! The bytes of a file, wherever they lie in memory.

/// Parts of memory, one after the other.
pub struct Content<'a> {
    parts: Vec<&'a [u8]>,
    /// End of each part in the file.
    ends: Vec<usize>,
}

impl<'a> Content<'a> {
    /// The parts in their order; empty ones do not matter.
    pub fn new(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let parts: Vec<&[u8]> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.len();
            Some(*end)
        });
        Self { ends: ends.collect(), parts }
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Fills `out` with what follows `start`; all of it must be there.
    ///
    /// Of `[b"abc", b"defg"]`, 3 bytes from 2 on are `cde`.
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
            let whole = parts.concat();
            prop_assert_eq!(content.len(), whole.len());
            prop_assert_eq!(content.is_empty(), whole.is_empty());
            let start = start.min(whole.len());
            let mut out = vec![0; bytes.min(whole.len() - start)];
            content.copy(start, &mut out);
            prop_assert_eq!(&out, &whole[start..start + out.len()]);
        }
    }
}
