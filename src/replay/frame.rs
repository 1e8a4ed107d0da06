//! A frame: the records that one member sends to another in a step, consecutive in memory.
//!
//! ```text
//! 0   XXH3-64 of the sizes     8   bytes of each record as u64, 0 after the last     8 + 8 · most   the records that fit
//! ```
//!
//! Records follow as far as they fit. The first that does not fit, and those after it, are the tail, which is a message
//! of its own. Gradients are encoded directly into the buffer that is sent: nothing is written twice.

use super::gradient::{encode_gradient, room_for};
use super::record::{HEADER_BYTES, Header, Kind, Rule, ignores_sign_of_zero};
use crate::cpu::{Gradient, Parallel};
use crate::ensure;
use crate::error::Result;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes before the sizes of the records.
pub const FRAME_HEAD_BYTES: usize = 8;
const SIZE_BYTES: usize = 8;

/// A record of a step whose gradient is not encoded yet.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// The unit: a digest of its name.
    pub unit: u64,
    /// The trainer's step.
    pub step: u64,
    /// The unit's own step count after the step.
    pub t: u64,
    /// The step's numbers.
    pub rule: Rule,
    /// Elements of the gradient.
    pub elements: usize,
    /// The gradient.
    pub gradient: Gradient<'a>,
}

impl Draft<'_> {
    /// Writes the record to the start of `out`; returns its size.
    fn write(&self, out: &mut [u8], pool: &dyn Parallel) -> usize {
        let any_zero = ignores_sign_of_zero(&self.rule);
        let (head, payload) = out.split_at_mut(HEADER_BYTES);
        let encoded = encode_gradient(self.gradient, self.elements, any_zero, payload, pool);
        let header = Header {
            kind: Kind::Step,
            encoding: encoded.encoding,
            rule: self.rule,
            unit: self.unit,
            step: self.step,
            t: self.t,
            elements: self.elements,
            payload_bytes: encoded.payload_bytes,
        };
        head.copy_from_slice(&header.seal(encoded.digest));
        HEADER_BYTES + encoded.payload_bytes
    }
}

/// A record to send.
#[derive(Debug, Clone, Copy)]
pub enum Outgoing<'a> {
    /// A finished record.
    Finished(&'a [u8]),
    /// A record that is encoded while it is written.
    Draft(Draft<'a>),
}

impl Outgoing<'_> {
    fn most_bytes(&self) -> usize {
        match self {
            Self::Finished(bytes) => bytes.len(),
            Self::Draft(draft) => HEADER_BYTES + room_for(draft.gradient),
        }
    }

    fn write(&self, out: &mut [u8], pool: &dyn Parallel) -> usize {
        match self {
            Self::Finished(bytes) => {
                out[..bytes.len()].copy_from_slice(bytes);
                bytes.len()
            }
            Self::Draft(draft) => draft.write(out, pool),
        }
    }
}

/// Fills a frame, which has room for the sizes of `most` records, and the tail with the records that do not fit.
///
/// Returns the bytes of both. The tail needs room for all records at their largest, or none if that fits the frame.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for more than `most` records, a frame without room for that number of sizes, or a tail without
/// room.
///
/// ```
/// use evermoe::cpu::Serial;
/// use evermoe::replay::{Outgoing, fill_frame};
/// let records = [Outgoing::Finished(&[1; 3]), Outgoing::Finished(&[2; 5])];
/// let (mut frame, mut tail) = ([0; 8 + 2 * 8 + 4], [0; 8]);
/// assert_eq!(fill_frame(&mut frame, 2, &records, &mut tail, &Serial)?, (8 + 2 * 8 + 3, 5));
/// assert_eq!((frame[8], frame[16], &frame[24..27], &tail[..5]), (3, 5, &[1; 3][..], &[2; 5][..]));
/// # Ok::<(), evermoe::Error>(())
/// ```
pub fn fill_frame(
    frame: &mut [u8],
    most: usize,
    records: &[Outgoing<'_>],
    tail: &mut [u8],
    pool: &dyn Parallel,
) -> Result<(usize, usize)> {
    let start = most.saturating_mul(SIZE_BYTES).saturating_add(FRAME_HEAD_BYTES);
    let (got, bytes) = (records.len(), frame.len());
    ensure!(got <= most, "records: expected {most} at most, got {got}");
    ensure!(
        start <= bytes,
        "frame: expected {start} bytes or more for the sizes of {most} records, got {bytes}"
    );
    let (head, body) = frame.split_at_mut(start);
    let needed: usize = records.iter().map(Outgoing::most_bytes).sum();
    let room = tail.len();
    ensure!(
        needed <= body.len() || needed <= room,
        "tail: expected room for {needed} bytes, got {room}: it takes the records that do not fit the frame"
    );
    let (checksum, sizes) = head.split_at_mut(FRAME_HEAD_BYTES);
    sizes.fill(0);
    let (mut end, mut tail_end, mut fits) = (0, 0, true);
    for (record, size) in records.iter().zip(sizes.chunks_exact_mut(SIZE_BYTES)) {
        let bytes;
        if fits && record.most_bytes() <= body.len() - end {
            bytes = record.write(&mut body[end..], pool);
        } else {
            bytes = record.write(&mut tail[tail_end..], pool);
            fits &= bytes <= body.len() - end;
            if fits {
                body[end..end + bytes].copy_from_slice(&tail[tail_end..tail_end + bytes]);
            }
        }
        *(if fits { &mut end } else { &mut tail_end }) += bytes;
        size.copy_from_slice(&(bytes as u64).to_le_bytes());
    }
    checksum.copy_from_slice(&xxh3_64(sizes).to_le_bytes());
    Ok((start + end, tail_end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Serial;
    use crate::replay::{Encoding, Record};

    /// Gradients of each encoding: zeros, bfloat16 values, float32, and a mix of zeros and float32.
    fn gradients() -> Vec<Vec<f32>> {
        let wide: Vec<f32> = (0..5000).map(|i| 1.0 + i as f32 / 4999.0).collect();
        let narrow: Vec<f32> = (0..3000).map(|i| (i % 64) as f32).collect();
        let mixed = [&wide[..1024], &[0.0; 2048]].concat();
        vec![vec![0.0; 700], narrow, wide, mixed]
    }

    fn draft(gradient: &[f32], unit: u64) -> Outgoing<'_> {
        let rule = Rule::Sgd([0.0; crate::cpu::SgdStep::LEN]);
        let (elements, gradient) = (gradient.len(), Gradient::F32(gradient));
        Outgoing::Draft(Draft { unit, step: 3, t: 2, rule, elements, gradient })
    }

    /// Encodes each record separately.
    fn alone(record: &Outgoing<'_>) -> Vec<u8> {
        let mut bytes = vec![0xee; record.most_bytes()];
        let written = record.write(&mut bytes, &Serial);
        bytes.truncate(written);
        bytes
    }

    #[test]
    fn records_follow_each_other_as_far_as_they_fit() {
        let gradients = gradients();
        let finished = [1; 333];
        let mut records: Vec<_> = (0..).zip(&gradients).map(|(unit, values)| draft(values, unit)).collect();
        records.insert(2, Outgoing::Finished(&finished));
        let each: Vec<Vec<u8>> = records.iter().map(alone).collect();
        let encodings = [0, 1, 3, 4].map(|place| Record::parse(&each[place]).unwrap().header.encoding);
        assert_eq!(encodings, [Encoding::Zero, Encoding::Bf16, Encoding::F32, Encoding::Blocks]);
        let ends: Vec<usize> =
            (0..=each.len()).map(|count| each[..count].iter().map(Vec::len).sum()).collect();
        let most: usize = records.iter().map(Outgoing::most_bytes).sum();
        // At each end of a record, a byte before and after it, and where all fit at their largest.
        let rooms = ends.iter().flat_map(|&end| [end.saturating_sub(1), end, end + 1]).chain([most]);
        for room in rooms {
            let (mut frame, mut tail) = (vec![0xaa; 8 + 8 * 7 + room], vec![0xbb; most]);
            let (end, tail_end) = fill_frame(&mut frame, 7, &records, &mut tail, &Serial).unwrap();
            let fitting = ends.iter().filter(|&&end| end <= room).count() - 1;
            assert_eq!(frame[64..end].to_vec(), each[..fitting].concat(), "room {room}");
            assert_eq!(tail[..tail_end].to_vec(), each[fitting..].concat(), "room {room}");
            let sizes: Vec<u64> =
                frame[8..64].as_chunks::<8>().0.iter().map(|size| u64::from_le_bytes(*size)).collect();
            assert_eq!(sizes[..5], each.iter().map(|bytes| bytes.len() as u64).collect::<Vec<_>>());
            assert_eq!(sizes[5..], [0, 0]);
            assert_eq!(frame[..8], xxh3_64(&frame[8..64]).to_le_bytes());
        }
    }

    #[test]
    fn what_has_no_room_is_refused() {
        let records = [Outgoing::Finished(&[1; 40]), Outgoing::Finished(&[2; 40])];
        let fill = |most, frame: usize, tail: usize| {
            fill_frame(&mut vec![0; frame], most, &records, &mut vec![0; tail], &Serial)
                .map_err(|e| e.to_string())
        };
        assert!(fill(1, 1000, 0).unwrap_err().contains("expected 1 at most, got 2"));
        assert!(fill(2, 23, 80).unwrap_err().contains("expected 24 bytes or more"));
        assert!(fill(2, 24 + 79, 79).unwrap_err().contains("expected room for 80 bytes, got 79"));
        assert!(fill(usize::MAX, 24, 80).unwrap_err().contains("frame"));
        assert_eq!(fill(2, 24 + 80, 0), Ok((104, 0)));
        assert_eq!(fill(2, 24 + 79, 80), Ok((64, 40)));
    }
}
