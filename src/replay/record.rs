//! A record: one step of a unit, or its full state, as bytes.
//!
//! A record is a header of 96 bytes and a payload, all little-endian:
//!
//! ```text
//! 0   "EVMR"    4  format, 2    5  kind    6  encoding of the gradient    7  how many numbers: 10 AdamW, 9 SGD, 0 none
//! 8   unit      16 step         24 t       32 elements of the gradient    40 bytes of the payload
//! 48  the step's numbers, 10 × float32, zeros after the last one           88 checksum
//! ```
//!
//! `unit` is a digest of the unit's name. `step` is the trainer's: the unit's version after the step. `t` is the unit's
//! own step count after the step, which does not grow if its gradient was None. The checksum is XXH3-64 of bytes 0 to
//! 88 and the payload's digest, which is XXH3-64 of the XXH3-64 of each 4096 bytes of it. The payload of a proof is
//! such a digest, of the trainer's state after the step.
//!
//! Example: unit 0x0102 takes no step in the trainer's step 3, and has taken 2 before. `45 56 4d 52  02 01 00 00
//! 02 01 00 00 00 00 00 00  03 00 00 00 00 00 00 00  02 00 00 00 00 00 00 00`, 56 zeros, and the checksum.

use super::bytes::Plain;
use super::checksum;
use super::gradient::{Encoding, is_payload};
use crate::cpu::{AdamWStep, Arithmetic, Parallel, SgdStep};
use xxhash_rust::xxh3::Xxh3;

const MAGIC: [u8; 4] = *b"EVMR";
const FORMAT: u8 = 2;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 96;
/// Bytes of the payload of a proof.
pub const PROOF_BYTES: usize = 8;
const CHECKSUM_AT: usize = HEADER_BYTES - 8;
const NUMBERS_AT: usize = 48;
/// Index of the gradients' factor among the numbers of either optimizer.
const FACTOR: usize = 2;

/// Outcome of a trainer's step for a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The unit took a step with the gradient of the payload.
    Step,
    /// The gradient was None: nothing changed, not even the unit's own step count.
    NoStep,
    /// The optimizer skipped the step because a gradient was not finite: nothing changed.
    SkipAll,
    /// Any outcome: the payload is the state after the step.
    FullState,
    /// No step: the payload is the digest of the trainer's state after the step, for comparison.
    Proof,
}

impl Kind {
    fn numbered(number: u8) -> Option<Self> {
        [Self::Step, Self::NoStep, Self::SkipAll, Self::FullState, Self::Proof]
            .into_iter()
            .find(|each| *each as u8 == number)
    }
}

/// The numbers of a step; their count identifies the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// No step.
    None,
    /// See [`AdamWStep`].
    AdamW([f32; AdamWStep::LEN]),
    /// See [`SgdStep`].
    Sgd([f32; SgdStep::LEN]),
}

impl Rule {
    /// Returns the rule with these numbers, by their count.
    pub fn from_slice(numbers: &[f32]) -> Option<Self> {
        match numbers.len() {
            0 => Some(Self::None),
            AdamWStep::LEN => Some(Self::AdamW(numbers.try_into().ok()?)),
            SgdStep::LEN => Some(Self::Sgd(numbers.try_into().ok()?)),
            _ => None,
        }
    }

    /// The numbers.
    pub fn as_slice(&self) -> &[f32] {
        match self {
            Self::None => &[],
            Self::AdamW(numbers) => numbers,
            Self::Sgd(numbers) => numbers,
        }
    }

    /// The numbers of the same step with gradients also multiplied by `clip`.
    ///
    /// The third number of both optimizers is the factor of the gradient: 1, or −1 to maximize, without clipping.
    #[must_use]
    pub(super) fn clipped(mut self, clip: f32) -> Self {
        match &mut self {
            Self::None => {}
            Self::AdamW(numbers) => numbers[FACTOR] *= clip,
            Self::Sgd(numbers) => numbers[FACTOR] *= clip,
        }
        self
    }

    fn is_known(&self) -> bool {
        match *self {
            Self::None => true,
            Self::AdamW(numbers) => AdamWStep::from_array(numbers).is_ok(),
            Self::Sgd(numbers) => SgdStep::from_array(numbers).is_ok(),
        }
    }

    /// Whether both are of one optimizer and have the same bits.
    pub(super) fn same(&self, other: &Self) -> bool {
        let (one, other) = (self.as_slice(), other.as_slice());
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.to_bits() == other.to_bits())
    }
}

/// Whether the sign of a zero in the gradient makes no difference to the state after a step.
///
/// It makes a difference in SGD, whose buffer takes over the gradient. It also does in AdamW if the first moment is
/// computed from the gradient's end (`fma(−β1, g − m, g)`, where `1 − β1` is a half or more): with `m = −0`, a gradient
/// of −0 results in −0, one of +0 in +0. It does not from the other end, `fma(1 − β1, g − m, m)`, nor in the arithmetic
/// of torch's fused kernel on CUDA.
pub fn ignores_sign_of_zero(rule: &Rule) -> bool {
    let Rule::AdamW(numbers) = rule else { return false };
    AdamWStep::from_array(*numbers)
        .is_ok_and(|step| step.arithmetic == Arithmetic::TorchCudaFused || step.one_minus_beta1 < 0.5)
}

/// Fault of a record. The remedy is always to request the unit's full state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The bytes differ from those sent, or are no record.
    #[error("corrupt record: {0}")]
    Corrupt(String),
    /// The record was written by another version of this library.
    #[error("record of format {0}, expected {FORMAT}: use one version of evermoe on all nodes")]
    UnknownVersion(u8),
    /// This replica does not keep the unit.
    #[error("record of unit {0:#018x}, which this replica does not keep")]
    WrongUnit(u64),
    /// The unit has another size in this replica.
    #[error("record of {got} elements or bytes of state, expected {expected}")]
    WrongSize {
        /// Size in the replica's layout.
        expected: usize,
        /// Size in the record.
        got: usize,
    },
    /// There is no state that the step could follow: none yet, or none since an earlier fault.
    #[error("record of step {step}, but the replica has no state that it follows")]
    NoState {
        /// Step of the record.
        step: u64,
    },
    /// Records between the last one and this one are missing.
    #[error("record of step {got}, expected {expected}: the records in between are missing")]
    Gap {
        /// The next step.
        expected: u64,
        /// Step of the record.
        got: u64,
    },
    /// It is not newer than the last one, and differs from it.
    #[error("record of step {got}, expected {expected}: it was late, or the step was taken again")]
    Reordered {
        /// The next step.
        expected: u64,
        /// Step of the record.
        got: u64,
    },
}

fn corrupt<T>(what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Corrupt(what.into()))
}

/// All fields of a record except its payload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Header {
    /// Outcome of the step.
    pub kind: Kind,
    /// Encoding of the gradient; [`Encoding::Zero`] without one.
    pub encoding: Encoding,
    /// Numbers of the step; none without a step.
    pub rule: Rule,
    /// The unit: a digest of its name.
    pub unit: u64,
    /// The trainer's step: the unit's version after it.
    pub step: u64,
    /// The unit's own step count after the step.
    pub t: u64,
    /// Elements of the unit's gradient.
    pub elements: usize,
    /// Bytes after the header.
    pub payload_bytes: usize,
}

impl Header {
    /// Encodes the header for a payload with this digest.
    ///
    /// ```
    /// use evermoe::replay::{Encoding, Header, Kind, Rule};
    /// let header = Header {
    ///     kind: Kind::NoStep, encoding: Encoding::Zero, rule: Rule::None,
    ///     unit: 0x0102, step: 3, t: 2, elements: 0, payload_bytes: 0,
    /// };
    /// let bytes = header.seal(Header::digest(&[], &evermoe::cpu::Serial));
    /// assert_eq!(bytes[..12], [b'E', b'V', b'M', b'R', 2, 1, 0, 0, 2, 1, 0, 0]);
    /// assert_eq!((bytes[16], bytes[24]), (3, 2));
    /// ```
    pub fn seal(&self, digest: u64) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let numbers = self.rule.as_slice();
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&[FORMAT, self.kind as u8, self.encoding as u8, numbers.len() as u8]);
        let words = [self.unit, self.step, self.t, self.elements as u64, self.payload_bytes as u64];
        for (at, word) in (8..).step_by(8).zip(words) {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        for (at, number) in (NUMBERS_AT..).step_by(4).zip(numbers) {
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        let checksum = Self::checksum(&bytes, digest);
        bytes[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Digest of a payload for [`Self::seal`], if [`super::encode_gradient`] has not computed it.
    pub fn digest(payload: &[u8], pool: &dyn Parallel) -> u64 {
        checksum::digest(payload, pool)
    }

    fn checksum(header: &[u8], digest: u64) -> u64 {
        let mut state = Xxh3::new();
        state.update(&header[..CHECKSUM_AT]);
        state.update(&digest.to_le_bytes());
        state.digest()
    }

    fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        if bytes.len() < HEADER_BYTES {
            return corrupt(format!("expected {HEADER_BYTES} bytes or more, got {}", bytes.len()));
        }
        if bytes[..4] != MAGIC {
            return corrupt("the first 4 bytes are not EVMR");
        }
        if bytes[4] != FORMAT {
            return Err(Fault::UnknownVersion(bytes[4]));
        }
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let size = |at: usize| usize::try_from(word(at)).unwrap_or(usize::MAX);
        let numbers = bytes[NUMBERS_AT..CHECKSUM_AT].as_chunks::<4>().0;
        let numbers: Vec<f32> = numbers.iter().map(|number| f32::from_le_bytes(*number)).collect();
        let rule = numbers.get(..usize::from(bytes[7])).and_then(Rule::from_slice);
        let (Some(kind), Some(encoding), Some(rule)) =
            (Kind::numbered(bytes[5]), Encoding::numbered(bytes[6]), rule)
        else {
            return corrupt(format!("unknown combination of kind, encoding and count: {:?}", &bytes[5..8]));
        };
        let (elements, payload_bytes) = (size(32), size(40));
        Ok(Self { kind, encoding, rule, unit: word(8), step: word(16), t: word(24), elements, payload_bytes })
    }

    fn check(&self, payload: &[u8]) -> Result<(), Fault> {
        if payload.len() != self.payload_bytes {
            return corrupt(format!(
                "expected {} bytes of payload, got {}",
                self.payload_bytes,
                payload.len()
            ));
        }
        let fits = match self.kind {
            Kind::Step => self.rule != Rule::None && is_payload(self.encoding, payload, self.elements),
            Kind::NoStep | Kind::SkipAll => self.rule == Rule::None && payload.is_empty(),
            Kind::FullState => self.rule == Rule::None,
            Kind::Proof => self.rule == Rule::None && payload.len() == PROOF_BYTES,
        };
        if !fits || !self.rule.is_known() {
            return corrupt("numbers or payload do not fit the record's kind, or its arithmetic is unknown");
        }
        Ok(())
    }
}

/// A record with a valid header; [`Record::verify`] checks its checksum.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// All but the payload.
    pub header: Header,
    /// The payload.
    pub payload: &'a [u8],
    checksum: u64,
    bytes: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads one record, all of `bytes`.
    ///
    /// # Errors
    /// [`Fault::Corrupt`] or [`Fault::UnknownVersion`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Fault> {
        let header = Header::parse(bytes)?;
        let (head, payload) = bytes.split_at(HEADER_BYTES);
        header.check(payload)?;
        let checksum = head.last_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        Ok(Self { header, payload, checksum, bytes: head })
    }

    /// Checksum, which distinguishes the record from any other.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Copies the payload into newly allocated elements, the last one padded with zeros; returns them with the digest,
    /// and compares the checksum on the way.
    ///
    /// # Errors
    /// [`Fault::Corrupt`] if the checksum differs.
    pub(super) fn copied_payload<T: Plain>(&self, pool: &dyn Parallel) -> Result<(Vec<T>, u64), Fault> {
        let (values, digest) = checksum::copied(self.payload, pool);
        Ok((values, self.compare(digest)?))
    }

    /// Compares the checksum; returns the payload's digest.
    ///
    /// # Errors
    /// [`Fault::Corrupt`] if the checksum differs.
    pub fn verify(&self, pool: &dyn Parallel) -> Result<u64, Fault> {
        self.compare(checksum::digest(self.payload, pool))
    }

    fn compare(&self, digest: u64) -> Result<u64, Fault> {
        if Header::checksum(self.bytes, digest) != self.checksum {
            return corrupt("the record does not match its checksum");
        }
        Ok(digest)
    }
}
