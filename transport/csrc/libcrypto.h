// OpenSSL's libcrypto, of which the transport uses AES-256-GCM, HMAC-SHA256 and X25519. It is loaded
// for the first encrypted connection, so that neither the build nor other processes need it. The
// functions have the same form from 1.1.1 on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ms {

struct LibCrypto {
  // Loads the library on the first call. Throws NoCrypto if there is none.
  static const LibCrypto& get();

  const void* (*EVP_aes_256_gcm)();
  void* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(void*);
  int (*EVP_CipherInit_ex)(void*, const void* cipher, void* engine, const uint8_t* key, const uint8_t* iv, int seals);
  int (*EVP_CipherUpdate)(void*, uint8_t* out, int* out_size, const uint8_t* in, int in_size);
  int (*EVP_CipherFinal_ex)(void*, uint8_t* out, int* out_size);
  int (*EVP_CIPHER_CTX_ctrl)(void*, int what, int size, void* value);
  const void* (*EVP_sha256)();
  uint8_t* (*HMAC)(const void* hash, const void* key, int key_size, const uint8_t* data, size_t size, uint8_t* out,
                   unsigned* out_size);
  void (*OPENSSL_cleanse)(void*, size_t);
  void* (*EVP_PKEY_new_raw_private_key)(int type, void* engine, const uint8_t* key, size_t size);
  void* (*EVP_PKEY_new_raw_public_key)(int type, void* engine, const uint8_t* key, size_t size);
  int (*EVP_PKEY_get_raw_public_key)(const void*, uint8_t* out, size_t* size);
  void (*EVP_PKEY_free)(void*);
  void* (*EVP_PKEY_CTX_new)(void* key, void* engine);
  void (*EVP_PKEY_CTX_free)(void*);
  int (*EVP_PKEY_derive_init)(void*);
  int (*EVP_PKEY_derive_set_peer)(void*, void* peer);
  int (*EVP_PKEY_derive)(void*, uint8_t* out, size_t* size);

 private:
  LibCrypto();
};

constexpr size_t X25519_BYTES = 32;
// Returns the public key of a private one, both of X25519_BYTES.
std::string x25519_public(const std::string& private_key);
// Returns what both ends compute from their own private and the other's public key. Throws
// std::invalid_argument if that public key is none.
std::string x25519_shared(const std::string& private_key, const std::string& public_key);

}  // namespace ms
