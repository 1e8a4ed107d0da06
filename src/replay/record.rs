//! One step of a unit, or its full state, as bytes.
//!
//! A record is a header of 96 bytes and a payload, all little-endian:
//!
//! ```text
//! 0   "EVMR"    4  format, 2    5  kind    6  encoding of the gradient    7  how many numbers: 10 AdamW, 9 SGD, 0 none
//! 8   unit      16 step         24 t       32 elements of the gradient    40 bytes of the payload
//! 48  the step's numbers, 10 × float32, zeros after the last one           88 checksum
//! ```
//!
//! `unit` is a digest of the unit's name. `step` is the trainer's: the version that the unit has afterwards. `t` is how
//! many steps the unit itself has taken by then, which stays where its gradient was None. The checksum is XXH3-64 of bytes
//! 0 to 88 and the payload's digest, which is XXH3-64 of the XXH3-64 of each 4096 bytes of it. The payload of a proof is such
//! a digest, of the trainer's state after the step.
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
/// Place of the factor of gradients among the numbers of either optimizer.
const FACTOR: usize = 2;

/// Outcome of a step of the trainer for a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// It took a step with the gradient of the payload.
    Step,
    /// The gradient was None: nothing changed, the unit's own count of steps neither.
    NoStep,
    /// The optimizer skipped the step, since a gradient was not finite: nothing changed.
    SkipAll,
    /// Whatever happened: the payload is the state afterwards.
    FullState,
    /// It says nothing of a step: the payload is the digest of the trainer's state after the step, to compare with.
    Proof,
}

impl Kind {
    fn numbered(number: u8) -> Option<Self> {
        [Self::Step, Self::NoStep, Self::SkipAll, Self::FullState, Self::Proof]
            .into_iter()
            .find(|each| *each as u8 == number)
    }
}

/// The numbers of a step, whose count says which optimizer's they are.
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
    /// The rule of so many numbers.
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

    /// The numbers of the same step with gradients multiplied by `clip` in addition.
    ///
    /// Both optimizers' third number is what a gradient is multiplied by: 1, or −1 to maximize, where nothing was clipped.
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

    /// Whether both are of one optimizer, and have the same bits.
    pub(super) fn same(&self, other: &Self) -> bool {
        let (one, other) = (self.as_slice(), other.as_slice());
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.to_bits() == other.to_bits())
    }
}

/// Whether a zero's sign in the gradient can make no difference to the state after a step.
///
/// It can in SGD, whose buffer takes over the gradient, and in AdamW where the first moment is computed from the gradient's
/// end (`fma(−β1, g − m, g)`, where `1 − β1` is a half or more): there, of `m = −0`, a gradient of −0 makes −0, one of +0
/// makes +0. From the other end, `fma(1 − β1, g − m, m)`, it cannot, nor in the arithmetic of torch's fused kernel on CUDA.
pub fn ignores_sign_of_zero(rule: &Rule) -> bool {
    let Rule::AdamW(numbers) = rule else { return false };
    AdamWStep::from_array(*numbers)
        .is_ok_and(|step| step.arithmetic == Arithmetic::TorchCudaFused || step.one_minus_beta1 < 0.5)
}

/// Fault of a record; the remedy is always to ask for the unit's full state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The bytes are not those that were sent, or no record.
    #[error("corrupt record: {0}")]
    Corrupt(String),
    /// Another version of this library wrote it.
    #[error("record of format {0}, expected {FORMAT}: use one version of evermoe on all nodes")]
    UnknownVersion(u8),
    /// This replica does not keep the unit.
    #[error("record of unit {0:#018x}, which this replica does not keep")]
    WrongUnit(u64),
    /// The unit has another size here.
    #[error("record of {got} elements or bytes of state, expected {expected}")]
    WrongSize {
        /// Size in the replica's layout.
        expected: usize,
        /// Size in the record.
        got: usize,
    },
    /// There is no state yet, or none after an earlier fault, that a step could follow.
    #[error("record of step {step}, but there is no state that it follows")]
    NoState {
        /// The record's.
        step: u64,
    },
    /// Records between the last one and this one are missing.
    #[error("record of step {got}, expected {expected}: those between are missing")]
    Gap {
        /// The next one.
        expected: u64,
        /// The record's.
        got: u64,
    },
    /// It is not newer than the last one, and not the same.
    #[error("record of step {got}, expected {expected}: it came late, or the step was taken anew")]
    Reordered {
        /// The next one.
        expected: u64,
        /// The record's.
        got: u64,
    },
}

fn corrupt<T>(what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Corrupt(what.into()))
}

/// All of a record but its payload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Header {
    /// Outcome of the step.
    pub kind: Kind,
    /// The form of the gradient; [`Encoding::Zero`] where there is none.
    pub encoding: Encoding,
    /// The step's numbers; none where there is no step.
    pub rule: Rule,
    /// The unit: a digest of its name.
    pub unit: u64,
    /// The trainer's step: the version that the unit has afterwards.
    pub step: u64,
    /// Steps that the unit has taken by then.
    pub t: u64,
    /// Elements of the unit's gradient.
    pub elements: usize,
    /// Bytes after the header.
    pub payload_bytes: usize,
}

impl Header {
    /// Writes the header, before a payload of this digest.
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

    /// The digest of a payload for [`Self::seal`], where [`super::encode_gradient`] has not made it.
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
            return corrupt(format!("no record has kind, encoding and count {:?}", &bytes[5..8]));
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
            return corrupt("numbers or payload are not those of its kind, or the arithmetic is not known");
        }
        Ok(())
    }
}

/// A record whose header reads well; its checksum is looked at with [`Record::verify`].
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

    /// Checksum that tells the record from any other.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// The payload as elements in memory of their own, whose last one is filled up with zeros, and its digest; compares the
    /// checksum on the way.
    ///
    /// # Errors
    /// [`Fault::Corrupt`] when the checksum is another one.
    pub(super) fn copied_payload<T: Plain>(&self, pool: &dyn Parallel) -> Result<(Vec<T>, u64), Fault> {
        let (values, digest) = checksum::copied(self.payload, pool);
        Ok((values, self.compare(digest)?))
    }

    /// Compares the checksum; returns the payload's digest.
    ///
    /// # Errors
    /// [`Fault::Corrupt`] when it is another one.
    pub fn verify(&self, pool: &dyn Parallel) -> Result<u64, Fault> {
        self.compare(checksum::digest(self.payload, pool))
    }

    fn compare(&self, digest: u64) -> Result<u64, Fault> {
        if Header::checksum(self.bytes, digest) != self.checksum {
            return corrupt("it does not match its checksum");
        }
        Ok(digest)
    }
}
