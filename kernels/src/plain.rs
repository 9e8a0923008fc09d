//! Structs as the kernels read them: C layout, little endian, padding zero, without one `unsafe`.

/// A value with a fixed place in device memory or in a kernel's arguments.
pub trait Plain {
    const ALIGN: usize;
    const SIZE: usize;
    /// Appends exactly `SIZE` bytes.
    fn write(&self, out: &mut Vec<u8>);

    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::SIZE);
        self.write(&mut out);
        out
    }
}

macro_rules! number {
    ($($t:ty),*) => {$(
        impl Plain for $t {
            const ALIGN: usize = size_of::<$t>();
            const SIZE: usize = size_of::<$t>();
            fn write(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
number!(u8, u16, u32, i32, u64, f32);

impl<T: Plain, const N: usize> Plain for [T; N] {
    const ALIGN: usize = T::ALIGN;
    const SIZE: usize = T::SIZE * N;
    fn write(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|v| v.write(out));
    }
}

/// The bytes of many, one after the other.
pub fn bytes_of<T: Plain>(values: &[T]) -> Vec<u8> {
    let mut out = Vec::with_capacity(T::SIZE * values.len());
    values.iter().for_each(|v| v.write(&mut out));
    out
}

/// `at` rounded up to a multiple of `align`.
pub const fn align_up(at: usize, align: usize) -> usize {
    at.div_ceil(align) * align
}

/// Declares a struct and its place in memory: fields in order, each at the next multiple of its alignment.
macro_rules! plain {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* pub $field:ident: $t:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name { $($(#[$field_meta])* pub $field: $t,)* }

        impl $crate::plain::Plain for $name {
            const ALIGN: usize = {
                let mut align = 1;
                $(if <$t as $crate::plain::Plain>::ALIGN > align { align = <$t as $crate::plain::Plain>::ALIGN; })*
                align
            };
            const SIZE: usize = {
                let mut at = 0;
                $(at = $crate::plain::align_up(at, <$t as $crate::plain::Plain>::ALIGN) + <$t as $crate::plain::Plain>::SIZE;)*
                $crate::plain::align_up(at, Self::ALIGN)
            };
            fn write(&self, out: &mut Vec<u8>) {
                let start = out.len();
                $(
                    let place = $crate::plain::align_up(out.len() - start, <$t as $crate::plain::Plain>::ALIGN);
                    out.resize(start + place, 0);
                    $crate::plain::Plain::write(&self.$field, out);
                )*
                out.resize(start + Self::SIZE, 0);
            }
        }
    };
}
pub(crate) use plain;

#[cfg(test)]
mod tests {
    use super::*;

    plain! {
        pub struct Mixed {
            pub a: u8,
            pub b: u32,
            pub c: [u16; 3],
            pub d: u64,
            pub e: u8,
        }
    }

    #[test]
    fn c_layout() {
        let v = Mixed { a: 1, b: 2, c: [3, 4, 5], d: 6, e: 7 };
        assert_eq!((Mixed::ALIGN, Mixed::SIZE), (8, 32));
        let expect = [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(v.to_bytes(), expect);
        assert_eq!(bytes_of(&[v, v]).len(), 64);
    }
}
